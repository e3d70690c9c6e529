// Readings of attention with their ends over all alternatives, as the file declares them: of single heads, whose maps
// stand in for those of the weights, and of layers or through layers, whose bars stand beside provenance.
import { barOrder, barScale, barsHeight, paintBars } from "./bars.js";
import { activeKey, activeQuery, drawFigure, figureCanvas, figureWidth, pickList, quoted, say } from "./figure.js";
import { element, number, percent } from "./parts.js";

const MEASURE_BARS = 12; // the strongest sources of a token
const MEASURE_MAPS = ["raw", "effective", "lower", "upper"];
const MEASURE_NAMED = 3;

/** The readings of a file, each with `row(part, query, layer, head)`; through layers, a file holds the last. */
export function measuresOf(view) {
  const n = view.about.tokens.length;
  const heads = view.about.attention?.head_numbers.length;
  return (view.about.measures ?? []).map((measure, at) => {
    const perHead = measure.axes.includes("head");
    const through = measure.axes.at(-1) === "input";
    const place = (layer, head) => (perHead ? layer * heads + head : through ? 0 : layer);
    const array = (part) => view.array(`measure${at}.${part}`).data;
    const row = (part, query, layer, head) => {
      const from = (place(layer, head) * n + query) * n;
      return Float64Array.from(array(part).subarray(from, from + n));
    };
    return { ...measure, perHead, through, row, certain: (query, layer, head) => array("certain")[place(layer, head) * n + query] };
  });
}

/** The chosen reading of heads; none: the weights are shown. */
export const headMeasure = (site, state) => site.measures.find(({ name, perHead }) => perHead && name === state.measure);

/** A reading of one head, in place of the head that it is of. */
export class MeasuredHead {
  constructor(head, measure, { layer, head: number }) {
    Object.assign(this, { n: head.n, keys: head.keys, seen: head.seen, maps: MEASURE_MAPS, rows: new Map() });
    this.visible = (query, key) => head.visible(query, key);
    this.row = (map, query) => measure.row(map, query, layer, number);
  }
}

/** What lower and upper are: the sums over a word's pieces are outer bounds, too. */
export const measureEnds = (exact) =>
  exact ? "No alternative is outside of lower and upper, and both occur." : "Lower and upper are outer bounds: no alternative is outside of them, and none need attain them.";

/** The sources of a token by a reading of layers, as bars from the least to the greatest. */
export class SourceBars {
  constructor(site) {
    this.site = site;
    this.measures = site.measures.filter(({ perHead }) => !perHead);
    this.canvas = figureCanvas();
    this.says = element("p", { class: "figure-says" });
    this.note = element("p", { class: "figure-note" });
    this.by = pickList("Compare with", this.measures.map(({ name, label }) => [name, label]), (beside) => site.store.set({ beside }));
    const holder = element("div", { class: "figure-holder" }, this.canvas);
    this.element = element("section", { class: "source-bars" }, this.by.element, this.says, holder, this.note);
  }

  /** The row that is drawn, and the reading that it is of. */
  row(state) {
    const measure = this.measures.find(({ name }) => name === state.beside) ?? this.measures[0];
    const query = activeQuery(state);
    const parts = Object.fromEntries(MEASURE_MAPS.map((part) => [part, measure.row(part, query, state.layer)]));
    const keys = this.site.names.map((_, key) => key).filter((key) => parts.upper[key] > 0 || parts.raw[key] > 0);
    return { ...parts, measure, query, keys, moved: null, movable: false, certain: measure.certain(query, state.layer), layer: measure.layers[measure.through ? 0 : state.layer] };
  }

  /** `attribution` returns the sources of a token after a layer, the largest first: positions and shares. */
  update(state, attribution) {
    if (!this.measures.length) return;
    const row = this.row(state);
    drawFigure(this.canvas, this, state);
    this.by.list.value = row.measure.name;
    say(this.says, this.sentence(row, attribution));
    say(this.note, `${row.measure.meaning} ${measureEnds(row.measure.exact)}`);
  }

  sentence({ measure, query, keys, raw, certain, layer }, attribution = () => []) {
    const { names } = this.site;
    const listed = (sources) => sources.slice(0, MEASURE_NAMED).map(([key, share]) => `${quoted(names[key])} (${number(share)})`).join(", ");
    const strongest = keys.map((key) => [key, raw[key]]).toSorted((one, other) => other[1] - one[1]);
    const told = `By ${measure.label}, ${quoted(names[query])} ${measure.through ? "after" : "in"} layer ${layer} comes most from ${listed(strongest)}; ${measure.exact ? "" : "at least "}${percent(certain)} of its row is determined.`;
    const other = attribution(layer, query);
    return other.length ? `${told} By Hidden Token Attribution, which is the same in every alternative, it comes most from ${listed(other)}.` : told;
  }

  /** Columns for the table of provenance, and their cells for a source of the token: empty but for the layer shown. */
  numbers(state) {
    if (!this.measures.length) return { columns: [], cells: () => [] };
    const row = this.row(state);
    const cells = (layer, input) => MEASURE_MAPS.map((part) => (layer === row.layer ? row[part][input] : null));
    return { columns: MEASURE_MAPS.map((part) => `${row.measure.label} ${part}`), cells };
  }

  size() {
    return [figureWidth(this.canvas), barsHeight(Math.min(MEASURE_BARS, this.site.names.length))];
  }

  paint(pen, state) {
    const [{ names }, row] = [this.site, this.row(state)];
    const order = barOrder(row, state.sort, MEASURE_BARS, state.key);
    paintBars(pen, row, { ...order, names, scale: barScale(row, order.shown, names, pen.width), colours: this.site.colours(), active: activeKey(state) });
  }

  describe(state) {
    return this.sentence(this.row(state));
  }
}
