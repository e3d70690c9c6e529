// What a reader can choose in the attention view: matrix or lines, which map, words, special tokens, the window.

import { choice, say, slider } from "./figure.js";
import { MAPS } from "./sheet.js";
import { isSpecial, windowStart, WINDOW } from "./shown.js";
import { element } from "./parts.js";

/** A list to pick from, with its label in front. */
export function pickList(label, choices, choose) {
  const list = element("select", {}, ...choices.map(([value, words]) => element("option", { value, textContent: words })));
  list.onchange = () => choose(list.value);
  return {
    element: element("label", { className: "pick" }, element("span", { textContent: label }), list),
    list,
    update: (value) => {
      if (list.value !== value) list.value = value;
    },
  };
}

/** A box to tick. */
function tickBox(words, choose) {
  const box = element("input", { type: "checkbox" });
  box.onchange = () => choose(box.checked);
  return {
    element: element("label", { className: "tick" }, box, element("span", { textContent: words })),
    box,
    update: (value) => {
      box.checked = value;
    },
  };
}

export function attentionControls(site) {
  const { about } = site.view;
  const n = about.tokens.length;
  const set = (name) => (value) => site.store.set({ [name]: value });
  const shape = choice("Shape", [["matrix", "Matrix"], ["lines", "Lines"]], set("shape"));
  const map = pickList("Lines and text show", MAPS.map((name) => [name, name]), set("map"));
  const words = tickBox("Words", set("words"));
  const first = about.attention?.special_group === "first token";
  const special = tickBox(first ? "First token" : "Special tokens", set("special"));
  words.box.disabled = !about.words.length;
  words.element.title = about.words.length
    ? "Add up what the pieces of a word receive, and average what they do."
    : "The tokens of this text are not aligned with words.";
  special.box.disabled = !about.tokens.some((_, at) => isSpecial(about, at));
  special.element.title = "Draw their rows and columns, and let them count for the scale of colours.";
  const slide = slider("Window", { least: 0, most: Math.max(0, n - WINDOW), step: 1 }, set("from")); // of a long text
  return {
    element: element("div", { className: "maps-controls" }, shape.element, map.element, words.element, special.element,
      ...(n > WINDOW ? [slide.element] : [])),
    update(state) {
      shape.press(state.shape === "lines" ? "lines" : "matrix");
      map.update(MAPS.includes(state.map) ? state.map : "raw");
      words.update(state.words && about.words.length > 0);
      special.update(state.special);
      const from = windowStart(n, state.from);
      slide.input.value = from;
      say(slide.words, `tokens ${from} to ${Math.min(n, from + WINDOW) - 1} of ${n}`);
    },
  };
}
