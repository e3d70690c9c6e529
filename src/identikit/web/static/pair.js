// Two results side by side with one choice of head, and above them, where their tokens are the same, the difference.

import { AttentionView } from "./attention.js";
import { setTheme } from "./colour.js";
import { headName } from "./figure.js";
import { mount, panelOf, refresh } from "./main.js";
import { element, onceAFrame } from "./parts.js";
import { fileData, showFile } from "./report.js";

const PAIR_CHOICES = ["tab", "heads", "x", "y", "shape", "map", "measure", "overlay", "words", "special", "sort", "strip", "theme"];
const PAIR_TOKENS = ["query", "key", "from", "hoverQuery", "hoverKey"]; // followed where the texts are of one length

/** Show the two results that the file holds. */
export function showPair() {
  showFile((root) => {
    const sides = [0, 1].map((at) => {
      const side = element("div");
      const data = fileData(`identikit-data-${at}`);
      mount(side, data, { linked: at === 0, suffix: at ? "-2" : "", title: at ? "Second" : "First" });
      return { root: side, ...side.identikit };
    });
    const same = { query: sameTokens(sides, (about) => about), key: sameTokens(sides, (about) => about.keys ?? about) };
    followEachOther(sides, same);
    const difference = element("div", { class: "identikit difference" });
    root.className = "pair";
    root.replaceChildren(difference, ...sides.map((side) => side.root));
    showDifference(difference, sides, same);
  });
}

/** At which positions two texts have the same token; null where they are of different lengths. */
function sameTokens(sides, text) {
  const [first, second] = sides.map(({ site }) => text(site.view.about).tokens);
  return first.length === second.length ? first.map((token, position) => token === second[position]) : null;
}

/** The index in another result of a layer or head with the same number in the model; -1: the other lacks it. */
function twinIndex(from, to, name, index) {
  const numbers = ({ site }) => site.view.about.attention?.[`${name}_numbers`] ?? [];
  return numbers(to).indexOf(numbers(from)[index]);
}

/** Let what is chosen in one be chosen in the other; the second opens with what the first shows. */
function followEachOther(sides, same) {
  const names = [...PAIR_CHOICES, ...(same.query && same.key ? PAIR_TOKENS : [])];
  let following = false;
  const follow = (from, to, changed) => {
    const state = from.store.get();
    const change = Object.fromEntries(names.filter(changed).map((name) => [name, state[name]]));
    for (const name of ["layer", "head"].filter(changed)) {
      const index = twinIndex(from, to, name, state[name]);
      if (index >= 0) change[name] = index;
    }
    if (!Object.keys(change).length) return;
    following = true;
    to.store.set(change);
    following = false;
  };
  sides.forEach((from, at) => {
    const to = sides[1 - at];
    from.store.subscribe((state, before) => following || follow(from, to, (name) => state[name] !== before[name]));
  });
  follow(sides[0], sides[1], () => true);
}

/** The maps of the first result less those of the second, in a panel of its own. */
function showDifference(root, sides, same) {
  const [first, second] = sides;
  const names = sides.map(({ site }) => site.view.about.model);
  const differ = [same.query, same.key].some((all) => all?.includes(false));
  const less = names[0] === names[1] ? "The first result less the second." : `${names[0]} less ${names[1]}.`;
  const view = Object.assign(new AttentionView(differenceSite(first, second, same)), {
    id: "difference",
    title: "Difference",
    help: differ ? `${less} Rows and columns whose tokens differ are left out.` : less,
    unavailable: () => differenceMissing(sides, same, first.store.get()),
  });
  const title = element("div", { class: "title" }, element("h1", {}, "identikit"), element("span", {}, "two results side by side"));
  root.append(element("header", { class: "top" }, title));
  const panel = panelOf(view.site, view, root);
  root.identikit = { view };
  const ask = onceAFrame(() => {
    setTheme(root, first.site.theme());
    refresh(panel, first.store.get());
  });
  for (const { store } of sides) store.subscribe(ask);
  new ResizeObserver(ask).observe(root);
}

/** Why there is no difference to show; null where there is one. */
function differenceMissing(sides, same, state) {
  if (!sides.every(({ site }) => site.view.about.attention?.layers.some(({ form }) => form !== "none"))) return "Only pages with maps of attention have a difference.";
  if (!same.query || !same.key) return "The texts have different numbers of tokens, so their weights cannot be subtracted. Layer and head are chosen for both.";
  const missing = ["layer", "head"].some((name) => twinIndex(...sides, name, state[name]) < 0);
  return missing ? `The second result has no ${headName(sides[0].site.view, state)}.` : null;
}

/** The first result's site with differences in the place of its maps. */
function differenceSite(first, second, same) {
  const differences = new Map();
  const heads = (layer, head) => {
    const name = `${layer},${head}`;
    const twin = [twinIndex(first, second, "layer", layer), twinIndex(first, second, "head", head)];
    if (!differences.has(name)) differences.set(name, differenceHead(first.site.heads(layer, head), second.site.heads(...twin), same));
    return differences.get(name);
  };
  const view = { about: { ...first.site.view.about, measures_left_out: null }, array: () => null, has: () => false };
  const rows = { rows: new Map(), certainty: null, certain: () => NaN };
  return { ...first.site, heads, view, rows, measures: [], source: { live: false } };
}

/** The weights of one head less those of another; NaN where tokens differ, or neither sees the key. */
function differenceHead(first, second, same) {
  const visible = (query, key) => same.query[query] && same.key[key] && (first.visible(query, key) || second.visible(query, key));
  return {
    n: first.n,
    keys: first.keys,
    seen: true, // not all: `visible` says which
    isDifference: true,
    rows: new Map(), // nothing is kept: both heads keep their rows
    visible,
    row(map, query) {
      const [left, right] = [first.row(map, query), second.row(map, query)];
      return left && right && left.map((weight, key) => (visible(query, key) ? weight - right[key] : NaN));
    },
  };
}
