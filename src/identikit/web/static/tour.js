// A few steps through the page.

import { button, element } from "./parts.js";

const STEPS = [
  ["verdict", "The verdict says it in words. Below it is the text: the darker a token, the more of its attention is determined by the output: the same in every alternative, which is other attention with the same output. Click a token to follow it through all views."],
  ["picture", "The picture that the model reads, with one token's row on it. At least: what every alternative gives to a patch. A cross marks a patch that takes much of the image's attention for itself."],
  ["heads", "Each head is a point. Up is the determined share: heads at the bottom could have attended elsewhere with the same output. Click a head to open it."],
  ["attention", "The chosen head, four times. Raw: what the model computes. Effective: the smallest weights with the same output, which may be negative. Simplex: the alternative with the smallest weights, none of them negative. Null: raw less effective, which the output does not depend on."],
  ["edge", "One token's row. Each bar is an interval: what a weight is over all alternatives. Drag the end of a bar: the whole row moves to an alternative, and the head's output stays where it is."],
  ["bottom", "Layer by layer: which token each hidden vector still points to, and where it came from. Numbers has every number as a table. Export saves a view as a figure, as numbers, or as the Python that gives it."],
];

/** A button that starts the tour. */
export function tour(site, main) {
  const steps = STEPS.filter(([name]) => main.querySelector(`.place.${name}`));
  const words = element("p", { "aria-live": "polite" });
  const count = element("span", { class: "count" });
  const box = element("div", { class: "tour", role: "dialog", "aria-label": "Tour", hidden: true });
  let step = 0;
  let back = null;
  const mark = (name) => {
    for (const place of main.children) place.classList.toggle("toured", place.classList.contains(name));
  };
  const show = (to) => {
    if (to < 0 || to >= steps.length) {
      box.hidden = true;
      mark("");
      back?.focus();
      return;
    }
    step = to;
    const [name, text] = steps[step];
    words.textContent = text;
    count.textContent = `${step + 1} of ${steps.length}`;
    next.textContent = step === steps.length - 1 ? "Done" : "Next";
    earlier.disabled = step === 0;
    mark(name);
    main.querySelector(`.place.${name}`).scrollIntoView({ block: "start" });
    box.hidden = false;
    next.focus();
  };
  const earlier = button("Back", "The step before", () => show(step - 1));
  const next = button("Next", "The next step", () => show(step + 1));
  const close = button("Close", "End the tour", () => show(-1));
  box.append(words, element("div", { class: "tour-tools" }, count, earlier, next, close));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(-1);
  });
  main.parentElement.after(box);
  back = button("Tour", "A few steps through this page", () => show(0));
  return back;
}
