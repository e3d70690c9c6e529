// What the figures share: elements made without markup, a canvas that fits its panel, and numbers in words.
import { FONT, canvasPen } from "./pen.js";

/** An element with properties (or attributes) and children; text stays text. */
export function node(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Change the words of an element only where they differ: writing the same again costs a layout. */
export function say(element, words) {
  if (element.textContent !== words) element.textContent = words;
  if (element.hidden !== !words) element.hidden = !words;
}

/** Buttons of which one is pressed: `options` are [value, words] pairs. */
export function choice(label, options, chosen) {
  const buttons = options.map(([value, words]) => {
    const button = node("button", { type: "button", className: "choice-button", textContent: words });
    button.addEventListener("click", () => chosen(value));
    return [value, button];
  });
  const element = node("div", { className: "choice", role: "group", "aria-label": label }, ...buttons.map(([, button]) => button));
  const press = (now) => buttons.forEach(([value, button]) => button.setAttribute("aria-pressed", String(value === now)));
  return { element, press };
}

/** A slider with its label and words beside it. */
export function slider(label, { least, most, step }, moved) {
  const input = node("input", { type: "range", min: least, max: most, step, "aria-label": label });
  const words = node("span", { className: "slider-words" });
  input.addEventListener("input", () => moved(Number(input.value)));
  return { element: node("label", { className: "slider" }, node("span", { textContent: label }), input, words), input, words };
}

/** A canvas for a view's figure; it can be focused and tells its numbers in its label. */
export function figureCanvas() {
  return node("canvas", { className: "figure", tabIndex: 0, role: "img" });
}

/** How wide a figure may be: as wide as what holds it, or a page's column where nothing does. */
export const figureWidth = (canvas) => canvas.parentElement?.clientWidth || 640;

/** Draw a view on its canvas, and tell screen readers what it shows. */
export function drawFigure(canvas, view, state) {
  const [width, height] = view.size(state);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  view.paint(canvasPen(canvas, width, height), state);
  const words = view.describe(state);
  if (canvas.getAttribute("aria-label") !== words) canvas.setAttribute("aria-label", words);
}

/** Where a pointer is on a canvas, in the figure's pixels. */
export function pointOn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

/** The token that counts: the one hovered, or else the one pinned. */
export const activeQuery = (state) => (state.hoverQuery >= 0 ? state.hoverQuery : state.query);
export const activeKey = (state) => (state.hoverKey >= 0 ? state.hoverKey : state.key);

/** L4H5: a head by the model's own numbers. */
export function headName(view, state) {
  const { layer_numbers: layers, head_numbers: heads } = view.about.attention;
  return `L${layers[state.layer]}H${heads[state.head]}`;
}

/** How wide words are in the figures' font. */
export function wordsWidth(words, size = 12) {
  figureRuler ??= document.createElement("canvas").getContext("2d");
  figureRuler.font = `${size}px ${FONT}`;
  return figureRuler.measureText(words).width;
}

let figureRuler = null;

/** A small number in one digit, as 3e-8; 0 is 0. */
export const tiny = (value) => (value === 0 ? "0" : value >= 0.01 ? value.toFixed(2) : value.toExponential(0));

/** A token's name in quotation marks. */
export const quoted = (name) => `“${name}”`;
