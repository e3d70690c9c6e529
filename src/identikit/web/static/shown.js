// Which tokens the attention view draws: pieces or words, with or without special tokens, at most 512 at a time.

import { tokenNames } from "./data.js";

/** How many tokens are drawn at a time. */
export const WINDOW = 512;

/** The pieces of each word in order; a token that belongs to no word stands alone. */
function wordGroups(n, spans) {
  const stops = new Map(spans);
  const groups = [];
  for (let place = 0; place < n; ) {
    const stop = stops.get(place) ?? place + 1;
    groups.push(Array.from({ length: stop - place }, (_, at) => place + at));
    place = stop;
  }
  return groups;
}

/** Tokens that "special tokens off" leaves out: those of the tokenizer, or the first one where that is the sink. */
export function isSpecial(about, place, text = about) {
  const sees = about.keys ?? about; // where a sink is
  return Boolean(text.special[place]) || (place === 0 && text === sees && about.attention?.special_group === "first token");
}

/** The first token of the window around a wanted one. */
export function windowStart(n, from) {
  return Math.max(0, Math.min(Math.floor(from) || 0, n - WINDOW));
}

/** What is drawn of the queries; `keys` is the same of the keys, where they are another text's. */
export function shownTokens({ view, names, keyNames }, state) {
  const { about } = view;
  const queries = shownText(about, about, names, state);
  queries.keys = about.keys ? shownText(about, about.keys, keyNames, state) : queries;
  return queries;
}

/**
 * What is drawn of a text: groups of positions with names, their `order` among `all` tokens or words, and where each
 * position stands among the drawn ones (-1: left out).
 */
function shownText(about, text, names, state) {
  const n = text.tokens.length;
  const from = windowStart(n, state.from);
  const to = Math.min(n, from + WINDOW);
  const byWord = state.words && text.words.length > 0;
  const all = wordGroups(n, byWord ? text.words : []);
  const words = () => all.map((group) => shownWord(text.tokens, group));
  const allNames = byWord ? tokenNames(words(), all.map(([first]) => first)) : names;
  const groups = [];
  const labels = [];
  const order = [];
  const place = new Int32Array(n).fill(-1);
  all.forEach((group, at) => {
    const outside = group[0] < from || group[0] >= to;
    if (outside || (!state.special && isSpecial(about, group[0], text))) return;
    for (const piece of group) place[piece] = groups.length;
    groups.push(group);
    labels.push(allNames[at]);
    order.push(at);
  });
  return { groups, labels, order, place, from, to, n, byWord, size: groups.length, all: all.length };
}

function shownWord(tokens, group) {
  return group.map((piece, at) => (at ? tokens[piece].replace(/^##/, "") : tokens[piece])).join("").trim();
}
