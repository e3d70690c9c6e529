// The text twice: shaded by what the active token looks at, and by who looks at it.

import { say } from "./figure.js";
import { shadeOf } from "./lines.js";
import { element, number } from "./parts.js";

const STRIP_SHORT = 128; // tokens up to which a strip shows the whole text
const STRIP_TOKENS = 64; // of a longer one, those of largest weight, in order

export function attentionStrips(site) {
  const to = stripOf((at) => ({ hoverKey: at }), (at) => ({ key: at }), site);
  const by = stripOf(
    (at, state) => ({ hoverQuery: at, hoverKey: stripKey(state) }), // the strip stays while it is read
    (at, state) => ({ query: at, key: stripKey(state) }),
    site,
  );
  return {
    element: element("div", { className: "strips" }, to.element, by.element),
    update(state, { sheet, map, cursor, labels, colours, moved }) {
      const known = sheet.maps.includes(map);
      const key = cursor.key >= 0 ? cursor.key : cursor.query;
      const shade = shadeOf(colours, sheet.most);
      const row = () => sheet.row(map, cursor.query, map === "raw" && moved?.at === cursor.query ? state.moved : null);
      const shared = { sheet, labels, shade };
      to.update(known && cursor.query >= 0 ? row() : null, `looks at (${map})`, cursor.query, shared);
      by.update(known && key >= 0 ? sheet.column(map, key) : null, `is looked at by (${map})`, key, shared);
    },
  };
}

/** The key that the second strip is about. */
function stripKey(state) {
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
    update(weights, words, about, { sheet, labels, shade }) {
      say(title.firstChild, about >= 0 ? labels[about] : "");
      say(title.lastChild, weights ? ` ${words}` : "");
      const places = stripPlaces(weights ?? [], about);
      const name = `${places} ${weights?.length}`;
      if (last.shown !== sheet.shown || last.name !== name) { // else the same tokens stay where they are
        text.replaceChildren(...stripTokens(places, weights?.length ?? 0, sheet.shown, site.view.about.tokens));
        last = { shown: sheet.shown, name };
      }
      text.querySelectorAll("span").forEach((one, order) => {
        stripShade(one, weights[places[order]], shade, places[order] === about);
      });
    },
  };
}

function stripShade(one, weight, shade, active) {
  const { fill, ink } = shade(weight);
  const words = Number.isFinite(weight) ? number(weight) : "not seen";
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
