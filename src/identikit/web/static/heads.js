// All heads at once: a scatter of two readings, or a grid of layers and heads coloured by one of them.

import { css, mixed } from "./colour.js";
import { callCode, choice, figureCanvas, inkOn, pickList, pointable, quoted, sampledCode, say, wordsWidth } from "./figure.js";
import { canvasPen } from "./pen.js";
import { paintScatter, readingNumber, readingWords, scatterPoints } from "./scatter.js";
import { element } from "./parts.js";

const HEADS_WIDTH = 640; // of an exported figure
const HEADS_LEGEND = 28;

export class HeadsView {
  constructor(site) {
    this.site = site;
    this.id = "heads";
    this.title = "Heads";
    this.help = "One mark is one head. Click it, or use the arrow keys, to open it in the other views.";
    this.data = site.view.about.attention && headsData(site);
    this.hovered = null; // the head under the mouse, which only this view shows
    this.canvas = figureCanvas();
    const set = (name) => (value) => site.store.set({ [name]: value });
    const choices = (this.data?.axes ?? []).map(({ name, label }) => [name, label]);
    this.shape = choice("Heads as", [["scatter", "Scatter"], ["grid", "Grid"]], set("heads"));
    this.across = pickList("across", choices, set("x"));
    this.up = pickList("up", choices, set("y"));
    this.said = element("p", { className: "maps-read" });
    this.meaning = element("p", { className: "heads-meaning" });
    const controls = [this.shape.element, this.across.element, this.up.element];
    const parts = [element("div", { className: "maps-controls" }, ...controls), this.canvas, this.said, this.meaning];
    this.element = element("div", { className: "heads" }, ...parts);
    pointable(this.canvas, {
      under: (...point) => {
        const { width, height } = this.canvas.getBoundingClientRect();
        return headsAt(this.data, site.store.get(), width, height, ...point);
      },
      hover: (found) => this.hover(found),
      choose: (found) => openHead(site, found),
      press: (event) => headsPress(site, this.data, event),
    });
  }

  unavailable() {
    const { attention, unavailable } = this.site.view.about;
    if (!attention) return unavailable?.attention ?? "This page holds no attention.";
    return attention.readings?.length ? null : "This page holds intervals, but not the readings of whole heads.";
  }

  hover(found) {
    if (this.hovered?.layer === found?.layer && this.hovered?.head === found?.head) return;
    this.hovered = found;
    this.update(this.site.store.get());
  }

  update(state) {
    if (this.unavailable()) return;
    const width = Math.max(240, this.element.clientWidth || 360);
    const height = headsHeight(width, state, this.data);
    this.canvas.style.height = `${height}px`;
    headsPaint(canvasPen(this.canvas, width, height), this.site, this.data, state, this.hovered);
    const { x, y } = headsAxes(this.data, state);
    const grid = state.heads === "grid";
    this.shape.press(grid ? "grid" : "scatter");
    this.across.list.value = x.name;
    this.up.list.value = y.name;
    this.across.element.hidden = grid;
    say(this.up.element.firstChild, grid ? "coloured by" : "up");
    say(this.said, headsSaid(this.data, this.hovered ?? state, state));
    say(this.meaning, headsMeaning(this.data, state));
    this.canvas.setAttribute("aria-label", this.describe(state));
  }

  paint(pen, state) {
    headsPaint(pen, this.site, this.data, state, null);
  }

  size(state) {
    return [HEADS_WIDTH, headsHeight(HEADS_WIDTH, state, this.data)];
  }

  table() {
    const { data } = this;
    const residual = this.site.view.array("heads.residual");
    const worded = data.readings.filter(({ said }) => said);
    const rows = Array.from({ length: data.many }, (_, at) => [
      data.layers[Math.floor(at / data.heads.length)],
      data.heads[at % data.heads.length],
      ...data.readings.map(({ values }) => values[at]),
      ...worded.map(({ said }) => said[at]),
      ...(residual ? [residual.data[at]] : []),
    ]);
    const named = [...data.readings.map(({ label }) => label), ...worded.map(({ label }) => `${label} in words`)];
    return { columns: ["layer", "head", ...named, ...(residual ? ["residual"] : [])], rows };
  }

  python(state) {
    const { view } = this.site;
    const { x, y } = headsAxes(this.data, state);
    const coded = ({ name, code, sampled }) => [...(sampled ? sampledCode(view) : []), `${name} = ${code}`];
    const lines = (state.heads === "grid" || x === y ? [y] : [x, y]).flatMap(coded);
    return [`attention = ik.effective_attention(model, text${callCode(view, "attention")})`, ...lines].join("\n");
  }

  describe(state) {
    return `${this.data.many} heads. Open: ${headsSaid(this.data, state, state)}`;
  }
}

/** The chosen readings; for one that this file lacks, the usual one, or the first that it has. */
function headsAxes({ axes, usual }, state) {
  const pick = (...names) => names.map((wanted) => axes.find(({ name }) => name === wanted)).find(Boolean) ?? axes[0];
  return { x: pick(state.x, usual[0]), y: pick(state.y, usual[1]) };
}

/** The readings of every head, as the file declares them, each with its values; the layer is one more axis. */
function headsData(site) {
  const { layer_numbers: layers, head_numbers: heads, readings: declared = [], axes: usual = [] } = site.view.about.attention;
  const many = layers.length * heads.length;
  const numbers = (name) => site.view.array(`heads.${name}`)?.data;
  const ends = (name) => ["lower", "upper"].map((end) => numbers(`${name}.${end}`)).filter(Boolean);
  const valued = (reading) => ({ ...reading, values: numbers(reading.name) ?? [], ends: ends(reading.name) });
  const worded = (reading) => ({ ...reading, ...site.view.about.sampled?.[reading.name] }); // what rests on drawn rows
  const readings = declared.map(valued).map(worded).filter(({ values, said }) => said || values.some(Number.isFinite));
  const layer = {
    name: "layer", label: "layer", meaning: "The layer of the head, counted from 0.", code: "attention.layers", range: null, digits: 0, ends: [],
    values: Float64Array.from({ length: many }, (_, at) => layers[Math.floor(at / heads.length)]),
  };
  const name = (layer, head) => `L${layers[layer]}H${heads[head]}`;
  return { layers, heads, many, readings, axes: [...readings, layer], usual, name };
}

function headsHeight(width, state, data) {
  if (state.heads !== "grid") return Math.round(Math.min(380, Math.max(260, width * 0.82)));
  return 22 + data.layers.length * headsCell(width, data).height + HEADS_LEGEND;
}

function headsPaint(pen, site, data, state, hovered) {
  if (state.heads === "grid") headsGrid(pen, data, state, hovered, site.colours());
  else paintScatter(pen, data, { ...headsAxes(data, state), chosen: state, hovered }, site.colours());
}

function headsCell(width, { heads, layers }) {
  const across = (width - 34) / heads.length;
  return { width: across, height: Math.max(layers.length > 16 ? 13 : 20, Math.min(34, across)) };
}

/** From 0, or the least value where that is negative, to the most that the reading can be, or is. */
function headsRange({ values, range }) {
  const known = Array.from(values).filter(Number.isFinite);
  return [Math.min(0, ...known), range ? range[1] : Math.max(1, ...known)];
}

function headsGrid(pen, data, state, hovered, colours) {
  const { y: reading } = headsAxes(data, state);
  const [least, most] = headsRange(reading);
  const cell = headsCell(pen.width, data);
  const every = Math.ceil(16 / cell.width);
  data.heads.forEach((number, head) => {
    const middle = 32 + (head + 0.5) * cell.width;
    if (head % every === 0) pen.text(`H${number}`, middle, 8, colours.soft, { size: 10, align: "center" });
  });
  data.layers.forEach((number, layer) => {
    const top = 18 + layer * cell.height;
    pen.text(`L${number}`, 26, top + cell.height / 2, colours.soft, { size: 10, align: "right" });
    data.heads.forEach((_, head) => {
      const value = reading.values[layer * data.heads.length + head];
      const share = (value - least) / (most - least);
      headsBox(pen, { x: 32 + head * cell.width, top, ...cell }, share, readingNumber(reading, value), colours, reading.sampled?.[layer * data.heads.length + head]);
    });
  });
  for (const [one, line] of [[state, 2], [hovered, 1.25]]) {
    if (!one) continue;
    const [x, top] = [32 + one.head * cell.width, 18 + one.layer * cell.height];
    pen.rect(x, top, cell.width, cell.height, null, { stroke: colours.focus, line });
  }
  headsLegend(pen, reading, [least, most], colours);
}

/** Which shade stands for which reading. */
function headsLegend(pen, reading, [least, most], colours) {
  const y = pen.height - 9;
  let x = 32;
  const words = (said) => {
    pen.text(said, x, y, colours.soft, { size: 11 });
    x += wordsWidth(said, 11) + 8;
  };
  words(readingWords(reading, least));
  for (let step = 0; step <= 8; step += 1, x += 9) pen.rect(x, y - 4, 9.5, 8, css(mixed(colours.wash, colours.sure, step / 8)));
  x += 8;
  words(readingNumber(reading, most));
}

/** A head of the grid: filled by its share of the range, hollow where it is not known, with the number where it fits. */
function headsBox(pen, { x, top, width, height }, share, words, colours, sampled = false) {
  const known = Number.isFinite(share);
  const fill = known ? mixed(colours.wash, colours.sure, share) : null;
  pen.rect(x + 1, top + 1, width - 2, height - 2, fill && css(fill), known ? {} : { stroke: colours.faint });
  if (width < 26 || height < 16) return;
  const ink = known ? inkOn(fill, colours) : colours.soft;
  pen.text(known ? `${sampled ? "~" : ""}${words}` : "?", x + width / 2, top + height / 2, ink, { size: 10, align: "center" });
}

/** The head under a point of the canvas. */
function headsAt(data, state, width, height, x, y) {
  if (state.heads === "grid") {
    const cell = headsCell(width, data);
    const [head, layer] = [Math.floor((x - 32) / cell.width), Math.floor((y - 18) / cell.height)];
    return data.heads[head] === undefined || data.layers[layer] === undefined ? null : { layer, head };
  }
  let best = null;
  for (const point of scatterPoints(data, { ...headsAxes(data, state), width, height })) {
    const far = Math.hypot(point.x - x, point.y - y);
    if (far < (best?.far ?? 14)) best = { layer: point.layer, head: point.head, far };
  }
  return best && { layer: best.layer, head: best.head };
}

/** Open a head; where the file cannot move the pinned row there, pin the nearest row that it can move. */
function openHead(site, { layer, head }) {
  const { query } = site.store.get();
  const listed = site.source?.live || site.rows.find(layer, head, query) ? [] : site.rows.movable(layer, head).map((row) => row.query);
  const closer = (best, one) => (Math.abs(one - query) < Math.abs(best - query) ? one : best);
  const nearest = listed.reduce(closer, listed[0] ?? query);
  site.store.set({ layer, head, query: nearest });
  if (nearest !== query) site.tell(`${quoted(site.names[nearest])} is shown, not ${quoted(site.names[query])}: this file can move its row in this head.`);
}

const HEADS_STEPS = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0],
};

/** Arrow keys go to the next head of the grid; Enter opens the chosen one with a row that can be moved. */
function headsPress(site, data, event) {
  const { layer, head } = site.store.get();
  const step = HEADS_STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const next = { layer: layer + step[0], head: head + step[1] };
  if (data.layers[next.layer] !== undefined && data.heads[next.head] !== undefined) openHead(site, next);
}

function headsMeaning(data, state) {
  const { x, y } = headsAxes(data, state);
  const said = ({ label, meaning }) => `${label[0].toUpperCase()}${label.slice(1)}: ${meaning}`;
  if (state.heads === "grid") return said(y);
  return [...new Set([x, y])].map(said).concat(x.ends.length || y.ends.length ? "Lines reach from the least to the greatest of all alternatives." : [], "Marks that would coincide stand side by side.").join(" ");
}

/** The readings of one head in words; of those with ends, the ones that are axes. */
function headsSaid(data, { layer, head }, state) {
  const axes = Object.values(headsAxes(data, state));
  const at = layer * data.heads.length + head;
  const shown = data.readings.filter((reading) => !reading.ends.length || axes.includes(reading));
  return `${data.name(layer, head)}: ${shown.map((reading) => readingWords(reading, reading.values[at], at)).join(", ")}.`;
}
