// What the figures share: elements made without markup, a canvas that fits its panel, and numbers in words.
import { mixed } from "./colour.js";
import { button, element } from "./parts.js";
import { FONT, canvasPen } from "./pen.js";

/** Change the words of an element only where they differ: writing the same again costs a layout. */
export function say(where, words) {
  if (where.textContent !== words) where.textContent = words;
  if (where.hidden !== !words) where.hidden = !words;
}

/** Buttons of which one is pressed: `options` are [value, words] pairs. */
export function choice(label, options, chosen) {
  const buttons = options.map(([value, words]) => [value, button(words, "", () => chosen(value))]);
  const group = element("div", { class: "choice", role: "group", "aria-label": label }, ...buttons.map(([, made]) => made));
  const press = (now) => buttons.forEach(([value, made]) => made.setAttribute("aria-pressed", String(value === now)));
  return { element: group, press };
}

/** A slider with its label and words beside it. */
export function slider(label, { least, most, step }, moved) {
  const input = element("input", { type: "range", min: least, max: most, step, "aria-label": label });
  const words = element("span", { class: "slider-words" });
  input.addEventListener("input", () => moved(Number(input.value)));
  return { element: element("label", { class: "slider" }, element("span", {}, label), input, words), input, words };
}

/** A list to pick from, with its label in front. */
export function pickList(label, choices, choose) {
  const list = element("select", {}, ...choices.map(([value, words]) => element("option", { value, textContent: words })));
  list.onchange = () => choose(list.value);
  return { element: element("label", { className: "pick" }, element("span", {}, label), list), list };
}

/** A box to tick. */
export function tickBox(words, choose) {
  const box = element("input", { type: "checkbox" });
  box.onchange = () => choose(box.checked);
  return { element: element("label", { className: "tick" }, box, element("span", {}, words)), box };
}

/** A canvas for a view's figure; it can be focused and tells its numbers in its label. */
export function figureCanvas() {
  return element("canvas", { class: "figure", tabindex: "0", role: "img" });
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

/** Let a figure be used: `under` says what is at a point (null: nothing), `hover` and `choose` take that, `press` keys. */
export function pointable(canvas, { under, hover, choose, press, cursor = "pointer" }) {
  const at = (event) => under(...pointOn(canvas, event));
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    canvas.style.cursor = found === null ? "" : cursor;
    hover(found);
  });
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    if (found !== null) choose(found);
  });
  canvas.addEventListener("keydown", press);
}

/** The token that counts: the one hovered, or else the one pinned. */
export const activeQuery = (state) => (state.hoverQuery >= 0 ? state.hoverQuery : state.query);
export const activeKey = (state) => (state.hoverKey >= 0 ? state.hoverKey : state.key);

/** L4H5: a head by the model's own numbers. */
export function headName(view, state) {
  const { layer_numbers: layers, head_numbers: heads } = view.about.attention;
  return `L${layers[state.layer]}H${heads[state.head]}`;
}

/** layer=4, head=5: the same as Python's arguments. */
export function headCode(view, state) {
  const { layer_numbers: layers, head_numbers: heads } = view.about.attention;
  return `layer=${layers[state.layer]}, head=${heads[state.head]}`;
}

/** What a call of the library needs beside model and text to give what the page shows: of "text", "attention", …. */
export const callCode = (view, name) => view.about.calls?.[name] ?? "";

/** The Python that bounds rows: `where` they are. */
export function intervalsCode(view, where, options = "") {
  const looking = callCode(view, "looking"); // a decoder's attention is read first, and then asked
  if (!looking) return `ik.attention_intervals(model, text, ${where}${options}${callCode(view, "text")})`;
  return `ik.effective_attention(model, text${callCode(view, "attention") || looking}).intervals(${where}${options})`;
}

/** A comment in Python where a page rests on some rows, and what it stands above gives all; otherwise nothing. */
export function sampledCode({ about }) {
  const { bounded = 0, free = 0 } = about.certain ?? {};
  return bounded < free ? [`# The page bounded ${bounded} of ${free} free rows; this bounds all of them.`] : [];
}

/** How wide words are in the figures' font. */
export function wordsWidth(words, size = 12) {
  figureRuler ??= document.createElement("canvas").getContext("2d");
  figureRuler.font = `${size}px ${FONT}`;
  return figureRuler.measureText(words).width;
}

let figureRuler = null;

/** The theme's ink or paper, whichever is read more easily on a colour (three numbers). */
export function inkOn(fill, colours) {
  const light = (rgb) => rgb.reduce((sum, part, at) => sum + [0.2126, 0.7152, 0.0722][at] * (part / 255) ** 2.2, 0.05);
  const contrast = (colour) => {
    const [one, other] = [light(fill), light(mixed(colour, colour, 0))];
    return Math.max(one, other) / Math.min(one, other);
  };
  return contrast(colours.ink) >= contrast(colours.paper) ? colours.ink : colours.paper;
}

/** A small number in one digit, as 3e-8; 0 is 0. */
export const tiny = (value) => (value === 0 ? "0" : value >= 0.01 ? value.toFixed(2) : value.toExponential(0).replace("-", "−"));

/** A token's name in quotation marks. */
export const quoted = (name) => `“${name}”`;
