// The text twice: shaded by what the active token looks at, and by who looks at it.

import { node } from "./figure.js";
import { shadeOf } from "./lines.js";
import { number } from "./parts.js";

const STRIP_TOKENS = 64; // of a longer text, the tokens of largest weight, in order

export function attentionStrips(site) {
  const to = stripOf((at) => ({ hoverKey: at }), (at) => ({ key: at }), site);
  const by = stripOf(
    (at, state) => ({ hoverQuery: at, hoverKey: stripKey(state) }), // the strip stays while it is read
    (at, state) => ({ query: at, key: stripKey(state) }),
    site,
  );
  return {
    element: node("div", { className: "strips" }, to.element, by.element),
    update(state, { sheet, map, cursor, labels, colours, moved }) {
      const known = sheet.maps.includes(map);
      const key = cursor.key >= 0 ? cursor.key : cursor.query;
      const shade = shadeOf(colours, sheet.most);
      const row = () => sheet.row(map, cursor.query, map === "raw" && moved?.at === cursor.query ? state.moved : null);
      to.update(known && cursor.query >= 0 ? row() : null, `looks at (${map})`, cursor.query, { sheet, labels, shade });
      by.update(known && key >= 0 ? sheet.column(map, key) : null, `is looked at by (${map})`, key, { sheet, labels, shade });
    },
  };
}

/** The key that the second strip is about. */
function stripKey(state) {
  const keys = [state.hoverKey, state.hoverQuery < 0 ? state.key : -1, state.hoverQuery, state.query];
  return keys.find((key) => key >= 0) ?? -1;
}

function stripOf(hover, pin, site) {
  const title = node("h4");
  const text = node("p", { className: "strip" });
  let last = {};
  const spot = (event) => {
    const position = event.target.dataset?.position;
    return position === undefined ? -1 : Number(position);
  };
  text.addEventListener("pointerover", (event) => {
    const at = spot(event);
    if (at >= 0) site.store.set(hover(at, site.store.get()));
  });
  text.addEventListener("pointerleave", () => site.store.set({ hoverQuery: -1, hoverKey: -1 }));
  text.addEventListener("click", (event) => {
    const at = spot(event);
    if (at >= 0) site.store.set(pin(at, site.store.get()));
  });
  return {
    element: node("section", {}, title, text),
    update(weights, words, about, { sheet, labels, shade }) {
      const same = last.sheet === sheet && last.about === about && last.words === words && last.done === sheet.done;
      if (same && last.paper === shade(0).fill && last.weights?.every((weight, at) => Object.is(weight, weights?.[at]))) return;
      last = { sheet, about, words, weights, done: sheet.done, paper: shade(0).fill };
      title.replaceChildren(node("b", { textContent: about >= 0 ? labels[about] : "" }), ` ${weights ? words : ""}`);
      text.replaceChildren(...stripTokens(weights ?? [], about, sheet.shown, site.view.about.tokens, shade));
    },
  };
}

/** Tokens with a colour behind them; runs of small weights in a long text become an ellipsis. */
function stripTokens(weights, about, shown, tokens, shade) {
  const size = (at) => (at === about ? Infinity : Math.abs(weights[at]) || 0);
  const places = Array.from(weights.keys());
  const kept = places.length <= STRIP_TOKENS ? places : places.sort((a, b) => size(b) - size(a)).slice(0, STRIP_TOKENS).sort((a, b) => a - b);
  const made = [];
  kept.forEach((at, order) => {
    if (at !== (order ? kept[order - 1] + 1 : 0)) made.push(node("i", { textContent: "…" }));
    const { fill, ink } = shade(weights[at]);
    const word = shown.byWord ? shown.labels[at].replace(/@\d+$/, "") : tokens[shown.groups[at][0]];
    const one = node("span", { textContent: word, title: Number.isFinite(weights[at]) ? number(weights[at]) : "not seen" });
    one.dataset.position = shown.groups[at][0];
    Object.assign(one.style, { background: fill ?? "transparent", color: ink });
    if (at === about) one.className = "active";
    made.push(one);
  });
  if (kept.length && kept.at(-1) < weights.length - 1) made.push(node("i", { textContent: "…" }));
  return made;
}
