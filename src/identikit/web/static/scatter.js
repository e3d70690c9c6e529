// A scatter of heads: two readings as axes, shaded by layer; heads that would coincide stand side by side.

import { css, mixed } from "./colour.js";

const SCATTER = { left: 50, right: 14, top: 14, bottom: 64, unknown: 16 };

/** A value of a reading, with as many digits as the file declares; a share is 0 or 1 only where it is. */
export function readingNumber({ digits, range }, value) {
  if (!Number.isFinite(value)) return "unknown";
  const unit = 10 ** -digits;
  const share = range?.[0] === 0 && range[1] === 1;
  if (share && value < 1 - 1e-6 && value >= 1 - unit / 2) return `>${(1 - unit).toFixed(digits)}`;
  if (share && value > 1e-6 && value < unit / 2) return `<${unit.toFixed(digits)}`;
  return value.toFixed(digits);
}

/** A reading in words: as the file says it of the head at a place, where that is an estimate or a range. */
export const readingWords = (reading, value, at) => `${reading.label} ${reading.said?.[at] ?? readingNumber(reading, value)}`;

const readingLacks = ({ values }) => !Array.from(values).every(Number.isFinite);

/** Round ticks over some values, about `count` of them, with all values inside. */
function roundTicks(values, count = 5) {
  const known = Array.from(values).filter(Number.isFinite);
  const [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  const rough = (most - least || Math.abs(most) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const to = Math.ceil(most / step - 1e-9);
  let from = Math.floor(least / step + 1e-9);
  if (from === to && to > 0) from -= 1; // below, where all values are one: a share of 1 has nothing above it
  return Array.from({ length: Math.max(1, to - from) + 1 }, (_, at) => Number(((from + at) * step).toPrecision(12)));
}

function scatterAxis(values, from, to, gap) {
  const ticks = roundTicks(values);
  const [least, most] = [ticks[0], ticks.at(-1)];
  const start = from + gap; // unknown readings stand between the edge and the axis
  const known = (value) => start + ((value - least) / (most - least)) * (to - start);
  const place = (value) => (Number.isFinite(value) ? known(value) : from + gap * 0.25);
  return { ticks, place };
}

/** All that an axis has to hold: the values, and where they have ends, these. */
const scatterReach = ({ values, ends }) => [values, ...ends].flatMap((part) => Array.from(part));

function scatterFrame(data, { x, y, width, height }) {
  const gap = (reading) => (readingLacks(reading) ? SCATTER.unknown : 0);
  const across = scatterAxis(scatterReach(x), SCATTER.left, width - SCATTER.right, gap(x));
  const up = scatterAxis(scatterReach(y), height - SCATTER.bottom, SCATTER.top, -gap(y));
  return { across, up, radius: data.many > 400 ? 3 : data.many > 150 ? 3.8 : 4.8 };
}

/** Where each head stands; the place depends on nothing but the readings and the size. */
export function scatterPoints(data, options) {
  const name = [options.x.name, options.y.name, options.width, options.height].join();
  if (data.points?.name !== name) data.points = { name, found: scatterPlaced(data, options) };
  return data.points.found;
}

function scatterPlaced(data, options) {
  const { across, up, radius } = scatterFrame(data, options);
  const taken = new Map();
  const step = 2 * radius;
  const cell = (x, y) => `${Math.round(x / step)},${Math.round(y / step)}`;
  const [right, bottom] = [options.width - radius - 3, options.height - SCATTER.bottom + radius];
  const free = (x, y, apart) => {
    if (x < SCATTER.left - radius || x > right || y < radius + 3 || y > bottom) return false;
    for (const dx of [-step, 0, step]) {
      for (const dy of [-step, 0, step]) {
        const near = taken.get(cell(x + dx, y + dy)) ?? [];
        if (near.some((one) => Math.hypot(one.x - x, one.y - y) < apart)) return false;
      }
    }
    return true;
  };
  return Array.from({ length: data.many }, (_, at) => {
    const [value, other] = [options.x.values[at], options.y.values[at]];
    const [x, y] = [across.place(value), up.place(other)];
    const [sure, otherSure] = [Number.isFinite(value), Number.isFinite(other)];
    let spot = { x, y };
    // The farther from the true place, the closer marks may stand: a crowd grows dense before it grows wide.
    for (let turn = 1; turn < 400 && !free(spot.x, spot.y, step * Math.max(0.2, 0.9 - turn / 60)); turn += 1) {
      spot = scatterBeside(x, y, radius, turn, [sure, otherSure]);
    }
    const point = {
      ...spot,
      layer: Math.floor(at / data.heads.length),
      head: at % data.heads.length,
      known: sure && otherSure && ![options.x, options.y].some(({ sampled }) => sampled?.[at]),
    };
    const home = cell(point.x, point.y);
    taken.set(home, [...(taken.get(home) ?? []), point]);
    return point;
  });
}

/** The next place to try: on a spiral around the true one, or along the edge where one of the readings is not known. */
function scatterBeside(x, y, radius, turn, [acrossKnown, upKnown]) {
  const along = (turn % 2 ? 1 : -1) * Math.ceil(turn / 2) * radius;
  if (!upKnown) return { x: x + along, y };
  if (!acrossKnown) return { x, y: y + along };
  const far = radius * 0.5 * Math.sqrt(turn);
  return { x: x + far * Math.cos(turn * 2.4), y: y + far * Math.sin(turn * 2.4) };
}

export function paintScatter(pen, data, { x, y, chosen, hovered }, colours) {
  const options = { x, y, width: pen.width, height: pen.height };
  const frame = scatterFrame(data, options);
  scatterAxes(pen, frame, { x, y }, colours);
  const points = scatterPoints(data, options);
  const same = (one, other) => other && one.layer === other.layer && one.head === other.head;
  for (const point of points) scatterEnds(pen, frame, point, { x, y, at: point.layer * data.heads.length + point.head }, colours);
  for (const point of points) {
    const fill = scatterShade(data, point.layer, colours);
    const style = point.known ? { stroke: colours.paper, line: 0.8 } : { stroke: fill, line: 1.5 };
    pen.circle(point.x, point.y, frame.radius, point.known ? fill : colours.paper, style);
  }
  const marked = [points.find((point) => same(point, chosen)), points.find((point) => same(point, hovered))];
  for (const point of marked.filter(Boolean)) {
    pen.circle(point.x, point.y, frame.radius + 3, null, { stroke: colours.focus, line: 2 });
  }
  if (marked[1]) scatterLabel(pen, data, marked[1], [x, y], colours);
  else if (marked[0]) scatterName(pen, data, marked[0], frame.radius, colours);
  scatterLegend(pen, data, colours);
}

/** Lines through a mark, from the least to the greatest of its readings. */
function scatterEnds(pen, { across, up }, point, { x, y, at }, colours) {
  const places = ({ ends }, axis) => ends.map((end) => axis.place(end[at]));
  const [left, right] = places(x, across);
  const [bottom, top] = places(y, up);
  if (Number.isFinite(x.values[at]) && right - left > 1) pen.line(left, point.y, right, point.y, colours.soft, { width: 1.5 });
  if (Number.isFinite(y.values[at]) && bottom - top > 1) pen.line(point.x, bottom, point.x, top, colours.soft, { width: 1.5 });
}

/** The shade of a layer: the later, the stronger. */
function scatterShade({ layers }, layer, colours) {
  const share = layers.length > 1 ? layer / (layers.length - 1) : 1;
  return css(mixed(colours.faint, colours.minus, 0.15 + 0.85 * share));
}

function scatterAxes(pen, { across, up }, { x, y }, colours) {
  const [left, bottom] = [SCATTER.left, pen.height - SCATTER.bottom];
  const digits = (ticks) => Math.max(0, ...ticks.map((tick) => (String(tick).split(".")[1] ?? "").length));
  for (const tick of up.ticks) {
    pen.line(left, up.place(tick), pen.width - SCATTER.right, up.place(tick), colours.faint, { opacity: 0.6 });
    pen.text(tick.toFixed(digits(up.ticks)), left - 6, up.place(tick), colours.soft, { size: 11, align: "right" });
  }
  const widest = Math.max(...across.ticks.map((tick) => tick.toFixed(digits(across.ticks)).length)) * 6.1 + 6;
  const apart = across.place(across.ticks[1]) - across.place(across.ticks[0]);
  for (const [at, tick] of across.ticks.entries()) {
    pen.line(across.place(tick), SCATTER.top, across.place(tick), bottom, colours.faint, { opacity: 0.6 });
    if (at % Math.ceil(widest / apart)) continue; // its number would run into the one before
    pen.text(tick.toFixed(digits(across.ticks)), across.place(tick), bottom + 12, colours.soft, { size: 11, align: "center" });
  }
  pen.text(x.label, (left + pen.width - SCATTER.right) / 2, bottom + 32, colours.ink, { size: 12, align: "center" });
  pen.text(y.label, 10, (SCATTER.top + bottom) / 2, colours.ink, { size: 12, align: "center", turn: -Math.PI / 2 });
  if (readingLacks(y)) pen.text("?", left - 6, up.place(NaN), colours.soft, { size: 11, align: "right" });
  if (readingLacks(x)) pen.text("?", across.place(NaN), bottom + 12, colours.soft, { size: 11, align: "center" });
}

/** The name of the open head beside its mark. */
function scatterName(pen, data, point, radius, colours) {
  const words = data.name(point.layer, point.head);
  const [width, side] = [words.length * 7.4 + 8, point.x + 60 > pen.width ? -1 : 1];
  const x = point.x + side * (radius + 6);
  pen.rect(side > 0 ? x : x - width, point.y - 9, width, 18, colours.paper, { opacity: 0.85 });
  pen.text(words, x + side * 4, point.y, colours.focus, { size: 12, weight: "600", align: side > 0 ? "left" : "right" });
}

/** The name and the readings of a head beside its mark. */
function scatterLabel(pen, data, point, readings, colours) {
  const at = point.layer * data.heads.length + point.head;
  const lines = [...new Set(readings)].map((reading) => readingWords(reading, reading.values[at], at));
  const width = Math.max(...lines.map((line) => line.length)) * 6.1 + 16;
  const height = 24 + 15 * lines.length;
  const left = point.x + 12 + width > pen.width ? point.x - 12 - width : point.x + 12;
  const top = Math.min(pen.height - height - 2, Math.max(2, point.y - height / 2));
  pen.rect(left, top, width, height, colours.paper, { stroke: colours.focus, opacity: 0.96 });
  pen.text(data.name(point.layer, point.head), left + 8, top + 13, colours.focus, { size: 12, weight: "600" });
  lines.forEach((line, row) => pen.text(line, left + 8, top + 29 + 15 * row, colours.ink, { size: 11 }));
}

/** Which shade stands for which layer. */
function scatterLegend(pen, data, colours) {
  if (data.layers.length < 2) return;
  const [middle, y] = [(SCATTER.left + pen.width - SCATTER.right) / 2, pen.height - 9];
  const step = 80 / data.layers.length;
  pen.text(`layer ${data.layers[0]}`, middle - 46, y, colours.soft, { size: 11, align: "right" });
  data.layers.forEach((_, layer) => {
    pen.rect(middle - 40 + layer * step, y - 4, step + 0.5, 8, scatterShade(data, layer, colours));
  });
  pen.text(String(data.layers.at(-1)), middle + 46, y, colours.soft, { size: 11 });
}
