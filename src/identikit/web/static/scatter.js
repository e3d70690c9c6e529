// A scatter of heads: two readings as axes, shaded by layer; heads that would coincide stand side by side.

import { css, mixed } from "./colour.js";

const SCATTER = { left: 50, right: 14, top: 14, bottom: 46, unknown: 16 };

/** Round ticks over some values, about `count` of them, with all values inside. */
export function roundTicks(values, count = 5) {
  const known = Array.from(values).filter(Number.isFinite);
  const [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  const rough = (most - least || Math.abs(most) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const [from, to] = [Math.floor(least / step + 1e-9), Math.ceil(most / step - 1e-9)];
  return Array.from({ length: Math.max(1, to - from) + 1 }, (_, at) => Number(((from + at) * step).toPrecision(12)));
}

function scatterAxis(values, from, to, gap) {
  const ticks = roundTicks(values);
  const [least, most] = [ticks[0], ticks.at(-1)];
  const start = from + gap; // unknown readings stand between the edge and the axis
  const place = (value) => (Number.isFinite(value) ? start + ((value - least) / (most - least)) * (to - start) : from + gap * 0.25);
  return { ticks, place };
}

function scatterFrame(data, { x, y, width, height }) {
  const unknown = (name) => (Array.from(data.values[name]).every(Number.isFinite) ? 0 : SCATTER.unknown);
  const across = scatterAxis(data.values[x], SCATTER.left, width - SCATTER.right, unknown(x));
  const up = scatterAxis(data.values[y], height - SCATTER.bottom, SCATTER.top, -unknown(y));
  return { across, up, radius: data.many > 400 ? 3 : data.many > 150 ? 3.8 : 4.8 };
}

/** Where each head stands; the place depends on nothing but the readings and the size. */
export function scatterPoints(data, options) {
  const name = [options.x, options.y, options.width, options.height].join();
  if (data.points?.name !== name) data.points = { name, found: scatterPlaced(data, options) };
  return data.points.found;
}

function scatterPlaced(data, options) {
  const { across, up, radius } = scatterFrame(data, options);
  const taken = new Map();
  const step = 2 * radius;
  const cell = (x, y) => `${Math.round(x / step)},${Math.round(y / step)}`;
  const free = (x, y) => {
    for (const dx of [-step, 0, step]) {
      for (const dy of [-step, 0, step]) {
        for (const one of taken.get(cell(x + dx, y + dy)) ?? []) if (Math.hypot(one.x - x, one.y - y) < step * 0.9) return false;
      }
    }
    return true;
  };
  return Array.from({ length: data.many }, (_, at) => {
    const [value, other] = [data.values[options.x][at], data.values[options.y][at]];
    const [x, y] = [across.place(value), up.place(other)];
    let spot = { x, y };
    for (let turn = 1; turn < 200 && !free(spot.x, spot.y); turn += 1) {
      const far = radius * 0.8 * Math.sqrt(turn); // a spiral: the nearest free place around the true one
      spot = { x: x + far * Math.cos(turn * 2.4), y: y + far * Math.sin(turn * 2.4) };
    }
    const point = {
      ...spot,
      layer: Math.floor(at / data.heads.length),
      head: at % data.heads.length,
      known: Number.isFinite(value) && Number.isFinite(other),
    };
    const home = cell(point.x, point.y);
    taken.set(home, [...(taken.get(home) ?? []), point]);
    return point;
  });
}

export function paintScatter(pen, data, { x, y, chosen, hovered, titles }, colours) {
  const options = { x, y, width: pen.width, height: pen.height };
  const frame = scatterFrame(data, options);
  scatterAxes(pen, data, frame, { x, y, titles }, colours);
  const points = scatterPoints(data, options);
  const same = (one, other) => other && one.layer === other.layer && one.head === other.head;
  for (const point of points) {
    const share = data.layers.length > 1 ? point.layer / (data.layers.length - 1) : 1;
    const fill = css(mixed(colours.faint, colours.minus, 0.15 + 0.85 * share));
    pen.circle(point.x, point.y, frame.radius, point.known ? fill : colours.paper, { stroke: point.known ? colours.paper : fill, line: point.known ? 0.8 : 1.5 });
  }
  const marked = [points.find((point) => same(point, chosen)), points.find((point) => same(point, hovered))];
  for (const point of marked) if (point) pen.circle(point.x, point.y, frame.radius + 3, null, { stroke: colours.focus, line: 2 });
  const said = marked[1] ?? marked[0];
  if (said) scatterLabel(pen, data, said, { x, y, titles }, colours);
  scatterLegend(pen, data, colours);
}

function scatterAxes(pen, data, { across, up }, { x, y, titles }, colours) {
  const [left, bottom] = [SCATTER.left, pen.height - SCATTER.bottom];
  const digits = (ticks) => Math.max(0, ...ticks.map((tick) => (String(tick).split(".")[1] ?? "").length));
  for (const tick of up.ticks) {
    pen.line(left, up.place(tick), pen.width - SCATTER.right, up.place(tick), colours.faint, { opacity: 0.6 });
    pen.text(tick.toFixed(digits(up.ticks)), left - 6, up.place(tick), colours.soft, { size: 11, align: "right" });
  }
  for (const tick of across.ticks) {
    pen.line(across.place(tick), SCATTER.top, across.place(tick), bottom, colours.faint, { opacity: 0.6 });
    pen.text(tick.toFixed(digits(across.ticks)), across.place(tick), bottom + 12, colours.soft, { size: 11, align: "center" });
  }
  pen.text(titles[x][0], (left + pen.width - SCATTER.right) / 2, bottom + 32, colours.ink, { size: 12, align: "center" });
  pen.text(titles[y][0], 10, (SCATTER.top + bottom) / 2, colours.ink, { size: 12, align: "center", turn: -Math.PI / 2 });
  const unknown = (name) => !Array.from(data.values[name]).every(Number.isFinite);
  if (unknown(y)) pen.text("?", left - 6, up.place(NaN), colours.soft, { size: 11, align: "right" });
  if (unknown(x)) pen.text("?", across.place(NaN), bottom + 12, colours.soft, { size: 11, align: "center" });
}

/** The name and the readings of a head beside its mark. */
function scatterLabel(pen, data, point, { x, y, titles }, colours) {
  const at = point.layer * data.heads.length + point.head;
  const lines = [...new Set([x, y])].map((name) => `${titles[name][0]} ${data.number(name, data.values[name][at])}`);
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
  const [right, y] = [pen.width - SCATTER.right, pen.height - 12];
  const step = 60 / data.layers.length;
  pen.text(`layer ${data.layers[0]}`, right - 86, y, colours.soft, { size: 10, align: "right" });
  data.layers.forEach((_, layer) => {
    const share = layer / (data.layers.length - 1);
    pen.rect(right - 80 + layer * step, y - 4, step + 0.5, 8, css(mixed(colours.faint, colours.minus, 0.15 + 0.85 * share)));
  });
  pen.text(String(data.layers.at(-1)), right - 14, y, colours.soft, { size: 10 });
}
