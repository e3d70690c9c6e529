// The bars of one row of attention: which are shown, in which order, where they stand, and how they are drawn.
import { css, mixed } from "./colour.js";
import { wordsWidth } from "./figure.js";

const BAR_HEIGHT = 26; // a handle can be grabbed over the whole height of its bar
const BARS_TOP = 30;
const BARS_FOOT = 34;
const BARS_SAME = 1e-6; // weights that differ by less are the same
const BARS_REACH = 14; // pixels beside a handle that still grab it

export const barsHeight = (count) => BARS_TOP + count * BAR_HEIGHT + BARS_FOOT;

/** The keys of a row that are shown, in the order asked for: the largest `most` of them, and the pinned one. */
export function barOrder(row, sort, most, pinned) {
  const width = (key) => (row.lower ? row.upper[key] - row.lower[key] : 0);
  const size = sort === "width" && row.lower ? width : (key) => row.raw[key];
  const keys = row.keys.toSorted((one, other) => size(other) - size(one) || row.raw[other] - row.raw[one] || one - other);
  const shown = keys.slice(0, most);
  if (row.keys.includes(pinned) && !shown.includes(pinned)) shown[shown.length - 1] = pinned;
  const hidden = keys.filter((key) => !shown.includes(key));
  const largest = hidden.reduce((found, key) => Math.max(found, size(key)), 0);
  return { shown: sort === "text" ? shown.toSorted((one, other) => one - other) : shown, hidden: hidden.length, largest };
}

/** Where weights stand from left to right, in a figure of this width. */
export function barScale(row, shown, names, width) {
  let [least, most] = [0, 0];
  for (const key of shown) {
    least = Math.min(least, row.effective?.[key] ?? 0);
    most = Math.max(most, row.raw[key], row.upper?.[key] ?? 0, row.effective?.[key] ?? 0);
  }
  most = Math.max(most, 1e-3);
  const step = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find((one) => (most - least) / one <= 6) ?? 100;
  [least, most] = [Math.floor(least / step + 1e-9) * step, Math.ceil(most / step - 1e-9) * step];
  const longest = shown.reduce((found, key) => Math.max(found, wordsWidth(names[key])), 0);
  const left = Math.min(Math.max(longest + 24, 56), width * 0.34);
  const right = width - 58;
  const across = (right - left) / (most - least);
  return {
    left, right, least, most, step,
    x: (weight) => left + (weight - least) * across,
    weight: (x) => least + (x - left) / across,
  };
}

/** Whether an end of a bar can be pulled: where its vertex is known, and the weight is not there already. */
export function canPull(row, key, end) {
  return row.movable && row.found.hasVertex(key, end) && Math.abs(row[end][key] - row.raw[key]) > BARS_SAME;
}

/** What is under a point: a bar's key, and the end that would be grabbed there, if any. */
export function barAt(row, shown, scale, x, y) {
  const at = Math.floor((y - BARS_TOP) / BAR_HEIGHT);
  if (at < 0 || at >= shown.length) return null;
  const key = shown[at];
  if (!row.movable) return { key, end: null };
  // Ends outwards of the bar, so that both ends of a narrow bar can be reached.
  const away = { lower: Math.abs(x - scale.x(row.lower[key]) + 5), upper: Math.abs(x - scale.x(row.upper[key]) - 5) };
  const ends = ["lower", "upper"].filter((end) => canPull(row, key, end) && away[end] <= BARS_REACH);
  return { key, end: ends.toSorted((one, other) => away[one] - away[other])[0] ?? null };
}

/** Draw a row: `look` holds its scale, the keys shown, the names, the colours, the active key and what is grabbed. */
export function paintBars(pen, row, look) {
  const { shown, scale, colours } = look;
  barsAxis(pen, shown.length, scale, colours);
  shown.forEach((key, at) => barsOne(pen, row, key, BARS_TOP + at * BAR_HEIGHT, look));
  barsLegend(pen, row, BARS_TOP + shown.length * BAR_HEIGHT + 20, look);
}

function barsAxis(pen, count, { x, least, most, step }, colours) {
  const bottom = BARS_TOP + count * BAR_HEIGHT;
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  for (let at = 0; least + at * step <= most + step / 2; at += 1) {
    const weight = least + at * step;
    const zero = Math.abs(weight) < step / 2;
    pen.line(x(weight), BARS_TOP - 6, x(weight), bottom, zero ? colours.soft : colours.faint);
    pen.text(zero ? "0" : weight.toFixed(digits), x(weight), BARS_TOP - 16, colours.soft, { size: 11, align: "center" });
  }
}

function barsOne(pen, row, key, top, look) {
  const { scale, colours, names, active, grabbed } = look;
  const middle = top + BAR_HEIGHT / 2;
  const weight = row.moved ? row.moved[key] : row.raw[key];
  if (key === active) pen.rect(0, top, pen.width, BAR_HEIGHT, colours.focus, { opacity: 0.12 });
  const name = { size: 12, align: "right", widest: scale.left - 18, weight: key === active ? "bold" : "normal" };
  pen.text(names[key], scale.left - 16, middle, key === active ? colours.focus : colours.ink, name);
  if (row.lower) barsInterval(pen, row, key, middle, look);
  if (row.moved) pen.line(scale.x(row.raw[key]), middle - 8, scale.x(row.raw[key]), middle + 8, colours.soft, { width: 1.5 });
  pen.line(scale.x(weight), middle - 9, scale.x(weight), middle + 9, row.moved ? colours.plus : colours.ink, { width: 2.5 });
  if (row.effective) {
    pen.circle(scale.x(row.effective[key]), middle, 3.5, colours.minus, { stroke: colours.paper, line: 1.5 });
  }
  if (row.movable) {
    for (const end of ["lower", "upper"].filter((one) => canPull(row, key, one))) {
      const held = grabbed?.key === key && grabbed.end === end;
      barsHandle(pen, scale.x(row[end][key]) + (end === "lower" ? -5 : 5), middle, held, colours);
    }
  }
  pen.text(weight.toFixed(3), pen.width - 6, middle, row.moved ? colours.plus : colours.ink, { size: 12, align: "right" });
}

/** From 0 to the lower end the weight is determined; from there to the upper end it is free. */
function barsInterval(pen, row, key, middle, { scale, colours }) {
  const [zero, lower, upper] = [scale.x(0), scale.x(row.lower[key]), scale.x(row.upper[key])];
  pen.rect(zero, middle - 5, Math.max(0, lower - zero), 10, colours.sure);
  pen.rect(lower, middle - 5, Math.max(1, upper - lower), 10, css(mixed(colours.paper, colours.sure, 0.3)));
}

/** A grip that looks like one: a pill with a line. */
function barsHandle(pen, x, middle, held, colours) {
  const half = held ? 9 : 7;
  pen.rect(x - 3.5, middle - half, 7, 2 * half, held ? colours.plus : colours.paper, { stroke: held ? colours.plus : colours.sure, line: 1.5 });
  pen.line(x, middle - 3, x, middle + 3, held ? colours.paper : colours.sure);
}

function barsLegend(pen, row, y, { colours, scale }) {
  const marks = [
    row.lower && ["determined", (x) => pen.rect(x, y - 4, 14, 8, colours.sure)],
    row.lower && ["free", (x) => pen.rect(x, y - 4, 14, 8, css(mixed(colours.paper, colours.sure, 0.3)))],
    ["raw", (x) => pen.line(x + 7, y - 7, x + 7, y + 7, row.moved ? colours.soft : colours.ink, { width: row.moved ? 1.5 : 2.5 })],
    row.moved && ["moved", (x) => pen.line(x + 7, y - 7, x + 7, y + 7, colours.plus, { width: 2.5 })],
    row.effective && ["effective", (x) => pen.circle(x + 7, y, 3.5, colours.minus)],
  ].filter(Boolean);
  const total = marks.reduce((sum, [words]) => sum + 34 + wordsWidth(words, 11), 0);
  let x = Math.max(4, Math.min(scale.left, pen.width - total));
  for (const [words, mark] of marks) {
    mark(x);
    pen.text(words, x + 19, y, colours.soft, { size: 11 });
    x += 34 + wordsWidth(words, 11);
  }
}
