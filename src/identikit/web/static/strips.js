// The text twice: shaded by what the active token looks at, and by who looks at it.

import { say } from "./figure.js";
import { shadeOf } from "./lines.js";
import { element, number } from "./parts.js";

const STRIP_SHORT = 128; // tokens up to which a strip shows the whole text
const STRIP_TOKENS = 64; // of a longer one, those of largest weight, in order

export function attentionStrips(site) {
  const to = stripOf((at) => ({ hoverKey: at }), (at) => ({ key: at }), site);
  const by = stripOf(
    (at, state) => ({ hoverQuery: at, hoverKey: stripKey(site, state) }), // the strip stays while it is read
    (at, state) => ({ query: at, key: stripKey(site, state) }),
    site,
  );
  return {
    element: element("div", { className: "strips" }, to.element, by.element),
    update(state, { sheet, shown, map, cursor, labels, keyLabels, colours, moved }) {
      const known = sheet.maps.includes(map);
      const same = shown.keys === shown; // else a query is no key
      const key = cursor.key >= 0 || !same ? cursor.key : cursor.query;
      const shade = shadeOf(colours, sheet.most);
      const row = () => sheet.row(map, cursor.query, map === "raw" && moved?.at === cursor.query ? state.moved : null);
      to.update(known && cursor.query >= 0 ? row() : null, `looks at (${map})`, {
        isDifference: sheet.head.isDifference, name: labels[cursor.query], about: same ? cursor.query : cursor.key, shown: shown.keys, text: site.view.about.keys ?? site.view.about, shade });
      by.update(known && key >= 0 ? sheet.column(map, key) : null, `is looked at by (${map})`, {
        isDifference: sheet.head.isDifference, name: keyLabels[key], about: same ? key : cursor.query, shown, text: site.view.about, shade });
    },
  };
}

/** The key that the second strip is about. */
function stripKey(site, state) {
  if (site.view.about.keys) return state.hoverKey >= 0 ? state.hoverKey : state.key;
  const keys = [state.hoverKey, state.hoverQuery < 0 ? state.key : -1, state.hoverQuery, state.query];
  return keys.find((key) => key >= 0) ?? -1;
}

function stripOf(hover, pin, site) {
  const title = element("h3", {}, element("b"), element("span"));
  const text = element("p", { className: "strip" });
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
    element: element("section", {}, title, text),
    update(weights, words, { name: whose, isDifference, about, shown, text: { tokens }, shade }) {
      say(title.firstChild, whose ?? "");
      say(title.lastChild, weights ? ` ${words}` : "");
      const places = stripPlaces(weights ?? [], about);
      const name = `${places} ${weights?.length}`;
      if (last.shown !== shown || last.name !== name) { // else the same tokens stay where they are
        text.replaceChildren(...stripTokens(places, weights?.length ?? 0, shown, tokens));
        last = { shown, name };
      }
      text.querySelectorAll("span").forEach((one, order) => {
        stripShade(one, weights[places[order]], shade, places[order] === about, isDifference ? "left out" : "not seen");
      });
    },
  };
}

function stripShade(one, weight, shade, active, unseen) {
  const { fill, ink } = shade(weight);
  const words = Number.isFinite(weight) ? number(weight) : unseen;
  if (one.title !== words) one.title = words;
  one.style.background = fill ?? "transparent";
  one.style.color = ink;
  one.classList.toggle("active", active);
}

/** Which tokens a strip shows: all of a short text; of a longer one those of largest weight, in order. */
function stripPlaces(weights, about) {
  const size = (at) => (at === about ? Infinity : Math.abs(weights[at]) || 0);
  const places = Array.from(weights.keys());
  if (places.length <= STRIP_SHORT) return places;
  return places.sort((a, b) => size(b) - size(a)).slice(0, STRIP_TOKENS).sort((a, b) => a - b);
}

/** Tokens to put a colour behind, with an ellipsis for those between that are not shown. */
function stripTokens(places, many, shown, tokens) {
  const made = [];
  places.forEach((at, order) => {
    if (at !== (order ? places[order - 1] + 1 : 0)) made.push(element("i", { textContent: "…" }));
    const words = shown.byWord ? shown.labels[at].replace(/@\d+$/, "") : tokens[shown.groups[at][0]];
    const one = element("span", { textContent: words });
    one.dataset.position = shown.groups[at][0];
    made.push(one);
  });
  if (places.length && places.at(-1) < many - 1) made.push(element("i", { textContent: "…" }));
  return made;
}
