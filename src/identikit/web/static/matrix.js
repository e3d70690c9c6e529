// Four maps of one head side by side on one scale, with one cursor, what keys receive, and how much of each row is determined.

import { css, diverging } from "./colour.js";
import { number } from "./parts.js";
import { MAPS, tintedRow } from "./sheet.js";

const MATRIX_HEADER = 22;
const MATRIX_MARGINAL = 26;
const MATRIX_LABELS = 58;
const MATRIX_LEGEND = 44;
const MATRIX_STRIP = 12; // how much of each row is determined
const MATRIX_GAP = 14;
const MATRIX_FLATTEST = 0.35; // height over width of a map of few rows and many columns

/** Where the maps stand in a figure of this width: four beside one another, or two by two. */
export function matrixLayout(width, { size, across, all: maps } = { size: 1, across: 1, all: MAPS }) {
  const columns = width >= 880 ? 4 : 2;
  const names = width >= 520 ? 78 : 46;
  const left = names + MATRIX_STRIP + 4;
  const side = Math.max(40, Math.floor((width - left - MATRIX_GAP * (columns - 1) - 2) / columns));
  const high = Math.round(side * Math.min(1, Math.max(MATRIX_FLATTEST, size / across)));
  const step = MATRIX_HEADER + high + MATRIX_MARGINAL + MATRIX_GAP;
  const rows = maps.length / columns;
  const panels = maps.map((map, at) => ({
    map,
    x: left + (at % columns) * (side + MATRIX_GAP),
    y: Math.floor(at / columns) * step + MATRIX_HEADER,
    first: at % columns === 0,
    last: at >= maps.length - columns,
  }));
  const bottom = rows * step - MATRIX_GAP;
  return { panels, side, high, left, names, bottom, height: bottom + MATRIX_LABELS + MATRIX_LEGEND };
}

/** What is under a point: the map, and the drawn query and key (-1: beside the map, where only one of them is meant). */
export function matrixAt(layout, { size, across }, x, y) {
  const row = (from) => Math.min(size - 1, Math.floor(((y - from) / layout.high) * size));
  const column = (from) => Math.min(across - 1, Math.floor(((x - from) / layout.side) * across));
  for (const panel of layout.panels) {
    const inside = [x >= panel.x && x < panel.x + layout.side, y >= panel.y && y < panel.y + layout.high];
    const under = panel.last ? MATRIX_MARGINAL + MATRIX_LABELS : MATRIX_MARGINAL;
    if (inside[0] && inside[1]) return { map: panel.map, query: row(panel.y), key: column(panel.x) };
    if (panel.first && inside[1] && x < panel.x) return { map: panel.map, query: row(panel.y), key: -1 };
    if (inside[0] && y >= panel.y + layout.high && y < panel.y + layout.high + under) {
      return { map: panel.map, query: -1, key: column(panel.x) };
    }
  }
  return null;
}

/** Draw it. `cursor` holds the drawn query and key (-1: none), `certain` a number for each drawn query. */
export function paintMatrix(pen, picture) {
  const layout = matrixLayout(pen.width, picture.sheet);
  for (const panel of layout.panels) {
    if (picture.sheet.maps.includes(panel.map)) matrixPanel(pen, layout, panel, picture);
    else matrixMissing(pen, layout, panel, picture);
    if (panel.first) matrixRows(pen, layout, panel, picture);
  }
  matrixLegend(pen, layout, picture);
}

function matrixPanel(pen, layout, panel, { sheet, cursor, colours, moved, keyLabels }) {
  const { side, high } = layout;
  const { x, y, map } = panel;
  const cell = high / sheet.size;
  const changed = map === "raw" && moved;
  pen.text(changed ? "raw, moved" : map, x, y - 11, colours.ink, { size: 13, weight: "600" });
  if (cursor.query >= 0 && cursor.key >= 0) {
    const weight = changed && moved.at === cursor.query ? moved.row[cursor.key] : sheet.at(map, cursor.query, cursor.key);
    const words = Number.isNaN(weight) ? (sheet.head.isDifference ? "left out" : "not seen") : number(weight);
    pen.text(words, x + side, y - 11, colours.focus, { size: 13, weight: "600", align: "right" });
  }
  pen.cells(x, y, side, high, sheet.across, sheet.size, sheet.image(map, colours));
  if (changed) {
    pen.cells(x, y + moved.at * cell, side, Math.max(cell, 1), sheet.across, 1, tintedRow(moved.row, sheet.most, colours));
    pen.rect(x - 4, y + (moved.at + 0.5) * cell - 3, 4, 6, colours.focus);
  }
  pen.rect(x, y, side, high, null, { stroke: colours.faint });
  matrixCross(pen, layout, panel, sheet, cursor, colours);
  matrixMeans(pen, layout, panel, sheet, cursor, colours);
  if (panel.last) matrixKeys(pen, layout, panel, keyLabels, cursor, colours);
}

/** The cursor: a frame around the row and the column, or a thin line where cells are too small for one. */
function matrixCross(pen, { side, high }, { x, y }, sheet, cursor, colours) {
  const [wide, tall] = [side / sheet.across, high / sheet.size];
  const [across, down] = [x + (cursor.key + 0.5) * wide, y + (cursor.query + 0.5) * tall];
  const thin = { opacity: 0.7 };
  const frame = { stroke: colours.focus, line: 1.25 };
  if (cursor.query >= 0 && tall < 3) pen.line(x, down, x + side, down, colours.focus, thin);
  else if (cursor.query >= 0) pen.rect(x, down - tall / 2, side, tall, null, frame);
  if (cursor.key >= 0 && wide < 3) pen.line(across, y, across, y + high, colours.focus, thin);
  else if (cursor.key >= 0) pen.rect(across - wide / 2, y, wide, high, null, frame);
}

/** What each key receives on average, as bars from a line; the same scale under all maps. */
function matrixMeans(pen, { side, high }, { x, y, map }, sheet, cursor, colours) {
  const cell = side / sheet.across;
  const most = sheet.mostMean || 1;
  const half = MATRIX_MARGINAL - 6;
  const signed = sheet.sums[map].some((sum) => sum < 0);
  const line = y + high + 4 + (signed ? half / 2 : half);
  for (let key = 0; key < sheet.across; key += 1) {
    const length = (sheet.mean(map, key) / most) * (signed ? half / 2 : half);
    if (!(Math.abs(length) > 0.25)) continue;
    const fill = key === cursor.key ? colours.focus : length < 0 ? colours.minus : colours.plus;
    pen.rect(x + key * cell, Math.min(line, line - length), Math.max(cell * 0.85, 0.8), Math.abs(length), fill);
  }
  pen.line(x, line, x + side, line, colours.faint);
}

/** Names of keys below the lowest maps, as many as fit, and always that of the cursor. */
function matrixKeys(pen, { side, high }, { x, y }, labels, cursor, colours) {
  const top = y + high + MATRIX_MARGINAL + 6;
  for (const at of matrixTicks(labels.length, side / labels.length, cursor.key)) {
    const fill = at === cursor.key ? colours.focus : colours.soft;
    const style = { size: 10, align: "right", turn: -Math.PI / 2, weight: at === cursor.key ? "600" : "normal" };
    pen.text(labels[at], x + (at + 0.5) * (side / labels.length), top, fill, { ...style, widest: MATRIX_LABELS - 12 });
  }
}

/** Names of queries, and how much of their rows is determined. */
function matrixRows(pen, layout, { x, y }, { labels, cursor, certain, colours }) {
  const cell = layout.high / labels.length;
  const bar = x - MATRIX_STRIP - 2;
  pen.rect(bar, y, MATRIX_STRIP - 3, layout.high, colours.wash);
  certain.forEach((share, at) => {
    if (share > 0) pen.rect(bar, y + at * cell, (MATRIX_STRIP - 3) * share, Math.max(cell * 0.85, 0.8), colours.sure);
  });
  for (const at of matrixTicks(labels.length, cell, cursor.query)) {
    const fill = at === cursor.query ? colours.focus : colours.soft;
    const style = { size: 10, align: "right", weight: at === cursor.query ? "600" : "normal", widest: layout.names - 14 };
    pen.text(labels[at], bar - 5, y + (at + 0.5) * cell, fill, style);
  }
}

/** Which places get a name: at least eleven pixels apart, and clear of that of the cursor. */
export function matrixTicks(size, cell, chosen) {
  const every = Math.max(1, Math.ceil(11 / cell));
  const found = [];
  for (let at = 0; at < size; at += every) if (chosen < 0 || Math.abs(at - chosen) * cell >= 11) found.push(at);
  return chosen < 0 ? found : [...found, chosen];
}

function matrixMissing(pen, layout, panel, { colours, missing, keyLabels, cursor }) {
  const { x, y, map } = panel;
  const { side, high } = layout;
  pen.text(map, x, y - 11, colours.ink, { size: 13, weight: "600" });
  pen.rect(x, y, side, high, colours.wash, { stroke: colours.faint });
  const lines = wrappedWords(missing(map), side - 24, 11);
  lines.forEach((words, at) => {
    const down = y + high / 2 + (at - (lines.length - 1) / 2) * 16;
    pen.text(words, x + side / 2, down, colours.soft, { size: 11, align: "center" });
  });
  if (panel.last) matrixKeys(pen, layout, panel, keyLabels, cursor, colours);
}

/** Words in lines of at most this width, by the guess that pens shorten words with. */
export function wrappedWords(words, widest, size) {
  const most = Math.max(8, Math.floor(widest / (size * 0.54)));
  const lines = [];
  for (const word of words.split(" ")) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && longer.length <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** The scale that all four maps share. Colours grow with the root of a weight, so a quarter stands half way. */
function matrixLegend(pen, layout, { sheet, colours, what }) {
  const width = Math.min(240, pen.width - layout.left - 8);
  const x = pen.width - width - 16;
  const y = layout.bottom + MATRIX_LABELS + 12;
  const scale = diverging(colours);
  const steps = 48;
  for (let at = 0; at < steps; at += 1) {
    const root = ((at + 0.5) / steps) * 2 - 1;
    pen.rect(x + (at * width) / steps, y, width / steps + 0.5, 10, css(scale(root * Math.abs(root))));
  }
  pen.rect(x, y, width, 10, null, { stroke: colours.faint });
  for (const [share, at] of [[-1, 0], [-0.25, 0.25], [0, 0.5], [0.25, 0.75], [1, 1]]) {
    const words = (share * sheet.most).toFixed(share && sheet.most < 0.2 ? 3 : 2).replace("-", "−");
    pen.text(share ? words : "0", x + at * width, y + 20, colours.soft, { size: 10, align: "center" });
  }
  if (x > 230) pen.text(`${what}, one scale for all maps`, x - 12, y + 5, colours.soft, { size: 11, align: "right" });
}
