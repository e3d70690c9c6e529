// One map as lines from queries on the left to keys on the right; the lines of the active token stand out.

import { css, diverging } from "./colour.js";
import { inkOn } from "./figure.js";
import { matrixTicks, wrappedWords } from "./matrix.js";

/** How many lines are drawn faintly behind those of the active token. */
export const LINES_DRAWN = 500;
const LINES_TOP = 34;

export function linesHeight(size) {
  return LINES_TOP + Math.round(Math.min(760, Math.max(120, size * 15))) + 12;
}

function linesColumn(pen) {
  const names = Math.min(170, Math.max(90, pen.width * 0.24));
  return { names, left: names + 8, right: pen.width - names - 8 };
}

/** How far down the one at a place among `count` stands. */
const linesDown = (pen, at, count) => LINES_TOP + ((at + 0.5) / count) * (pen.height - LINES_TOP - 12);

/** The drawn query (left half) or key (right half) under a point. */
export function linesAt(width, height, { size, across }, x, y) {
  const left = x < width / 2;
  const count = left ? size : across;
  const at = Math.floor(((y - LINES_TOP) / (height - LINES_TOP - 12)) * count);
  if (at < 0 || at >= count) return null;
  return left ? { query: at, key: -1 } : { query: -1, key: at };
}

/** Draw it. `strong` says whose lines stand out: {query, key}, at most one of them at least 0. */
export function paintLines(pen, { sheet, map, labels, keyLabels, strong, cursor, colours, missing, moved }) {
  const column = linesColumn(pen);
  pen.text("query", column.names, 14, colours.soft, { size: 12, align: "right" });
  pen.text("key", column.right + 8, 14, colours.soft, { size: 12 });
  if (!sheet.maps.includes(map)) {
    wrappedWords(missing(map), pen.width - 2 * column.names, 12).forEach((words, at) => {
      pen.text(words, pen.width / 2, LINES_TOP + 40 + at * 18, colours.soft, { size: 12, align: "center" });
    });
    return;
  }
  const draw = (query, key, weight, strength) => {
    const share = Math.abs(weight) / (sheet.most || 1);
    if (!(share > 0.002)) return;
    const style = { width: 0.4 + 5 * share * strength, opacity: Math.min(1, 0.04 + Math.sqrt(share)) * strength };
    pen.line(column.left, linesDown(pen, query, sheet.size), column.right, linesDown(pen, key, sheet.across), weight < 0 ? colours.minus : colours.plus, style);
  };
  const instead = map === "raw" ? moved : null;
  const row = strong.query < 0 ? [] : instead?.at === strong.query ? instead.row : sheet.drawnRow(map, strong.query);
  const lookers = strong.key < 0 ? [] : sheet.column(map, strong.key);
  if (instead && instead.at < lookers.length) lookers[instead.at] = instead.row[strong.key];
  const behind = strong.query >= 0 || strong.key >= 0 ? 0.14 : 0.8;
  for (const place of sheet.strongest(map, LINES_DRAWN)) {
    draw(Math.floor(place / sheet.across), place % sheet.across, sheet.weights[map][place], behind);
  }
  row.forEach((weight, key) => draw(strong.query, key, weight, 1));
  lookers.forEach((weight, query) => draw(query, strong.key, weight, 1));
  const shade = shadeOf(colours, sheet.most);
  const shared = { colours, width: column.names };
  linesNames(pen, { ...shared, labels, x: column.names, align: "right", marked: cursor.query },
    (at) => shade(lookers[at] ?? NaN));
  linesNames(pen, { ...shared, labels: keyLabels, x: column.right + 8, align: "left", marked: cursor.key },
    (at) => shade(row[at] ?? NaN));
}

/** The colour behind a name by its weight, and that of the letters on it, so that both can be read. */
export function shadeOf(colours, most) {
  const tint = diverging(colours, most || 1);
  return (weight) => {
    if (!Number.isFinite(weight)) return { fill: null, ink: colours.ink };
    const fill = tint(weight);
    return { fill: css(fill), ink: inkOn(fill, colours) };
  };
}

/** A column of names, shaded by the weight of their line to the active token. */
function linesNames(pen, { x, align, labels, colours, marked, width }, shade) {
  const cell = (pen.height - LINES_TOP - 12) / labels.length;
  const down = (at) => linesDown(pen, at, labels.length);
  const left = align === "right" ? x - width + 4 : x - 4;
  for (let at = 0; at < labels.length; at += 1) {
    const { fill } = shade(at);
    if (fill) pen.rect(left, down(at) - cell / 2, width, Math.max(cell - 1, 0.8), fill);
  }
  for (const at of matrixTicks(labels.length, cell, marked)) {
    const { fill, ink } = shade(at);
    const size = Math.max(10, Math.min(12, cell));
    const tall = cell < 11 ? size + 3 : cell - 1; // names further apart stay clear of the frame
    const style = { stroke: colours.focus, line: 1.25 };
    if (at === marked) pen.rect(left, down(at) - tall / 2, width, tall, fill ?? colours.paper, style);
    pen.text(labels[at], x, down(at), ink, { size, align, weight: at === marked ? "600" : "normal", widest: width - 12 });
  }
}
