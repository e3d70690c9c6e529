// Rows of attention with their intervals: those of the file, and those that a server adds.

import { activeQuery } from "./figure.js";

export const ROW_NARROW = 1e-6; // an interval that is narrower does not move

export class RowBook {
  constructor(view) {
    this.rows = new Map();
    this.certainty = view.array("certain");
    this.epsilons = [0, ...(view.about.rows?.epsilons ?? [])];
    if (view.has("rows.place")) this.add(view);
  }

  /** Take in the rows of a file; what is known of a row already is kept. */
  add(view) {
    const places = view.array("rows.place");
    const n = view.array("rows.lower").shape[1];
    const part = (name, row) => view.array(name)?.data.subarray(row * n, (row + 1) * n) ?? null;
    const found = [];
    for (let row = 0; row < places.shape[0]; row += 1) {
      const [layer, head, query] = places.data.subarray(3 * row, 3 * row + 3);
      const known = this.find(layer, head, query);
      const one = known ?? {
        layer,
        head,
        query,
        raw: part("rows.raw", row),
        lower: part("rows.lower", row),
        upper: part("rows.upper", row),
        strongest: view.array("rows.strongest").data[row],
        images: imageTotals(view, row),
        grid: new Map(),
        vertices: new Map(),
      };
      found.push(one);
      this.rows.set(`${layer},${head},${query}`, one);
    }
    this.addVertices(view, found, n);
    this.addGrid(view, found, n);
  }

  addVertices(view, found, n) {
    if (!view.has("vertex.row")) return;
    const [row, key, end, start, keys, weights] = ["row", "key", "end", "start", "keys", "weights"].map(
      (name) => view.array(`vertex.${name}`).data,
    );
    for (let at = 0; at < row.length; at += 1) {
      const make = () => {
        const whole = new Float64Array(n);
        for (let place = start[at]; place < start[at + 1]; place += 1) whole[keys[place]] = weights[place];
        return whole;
      };
      found[row[at]].vertices.set(`${key[at]},${end[at] ? "upper" : "lower"}`, make);
    }
  }

  addGrid(view, found, n) {
    if (!view.has("grid.row")) return;
    const [rows, lower, upper] = ["row", "lower", "upper"].map((name) => view.array(`grid.${name}`).data);
    view.about.rows.epsilons.forEach((epsilon, place, { length }) => {
      rows.forEach((row, at) => {
        const from = (at * length + place) * n;
        if (Number.isNaN(lower[from])) return;
        found[row].grid.set(epsilon, { lower: lower.subarray(from, from + n), upper: upper.subarray(from, from + n) });
      });
    });
  }

  /** A row with its intervals, or null where it was not bounded. */
  find(layer, head, query) {
    const one = this.rows.get(`${layer},${head},${query}`);
    if (!one) return null;
    return {
      ...one,
      movable: one.vertices.size > 0,
      /** The ends for a place in `epsilons`; null where they are not known. */
      at: (place) => (place ? (one.grid.get(this.epsilons[place]) ?? null) : { lower: one.lower, upper: one.upper }),
      /** The row with the same output that takes a key to an end of its interval; null where it is not known. */
      vertex: (key, end) => one.vertices.get(`${key},${end}`)?.() ?? null,
      hasVertex: (key, end) => one.vertices.has(`${key},${end}`),
    };
  }

  /** The rows of a head that can be moved. */
  movable(layer, head) {
    return this.inOrder((row) => row.layer === layer && row.head === head && row.vertices.size);
  }

  /** The rows, of any head, whose ends are known where the output may move. */
  withGrid() {
    return this.inOrder((row) => row.grid.size);
  }

  inOrder(wanted) {
    const order = (row, other) => row.layer - other.layer || row.head - other.head || row.query - other.query;
    return [...this.rows.values()].filter(wanted).sort(order);
  }

  /** The share of a row that is determined; NaN where it is not known. */
  certain(layer, head, query) {
    const row = this.rows.get(`${layer},${head},${query}`);
    if (row) return Math.min(1, row.lower.reduce((sum, weight) => sum + weight, 0));
    if (!this.certainty) return NaN;
    const [, heads, queries] = this.certainty.shape;
    return this.certainty.data[(layer * heads + head) * queries + query];
  }
}

/** What the images of a text get of a row, one by one or together: raw, lower, upper, and patch by patch at least. */
function imageTotals(view, row) {
  const array = view.array("rows.images");
  if (!array) return [];
  const [, parts, many] = array.shape;
  const at = (part, image) => array.data[(row * parts + part) * many + image];
  return Array.from({ length: many }, (_, image) => ({ raw: at(0, image), lower: at(1, image), upper: at(2, image), alone: at(3, image) }));
}

/** The row of the active token: weights, ends and what was moved. */
export function activeRow({ heads, rows, keyNames }, state) {
  const query = activeQuery(state);
  const head = heads(state.layer, state.head);
  const found = rows.find(state.layer, state.head, query);
  const raw = head.row("raw", query) ?? found?.raw ?? null;
  const keys = raw ? keyNames.map((_, key) => key).filter((key) => head.visible(query, key)) : [];
  // A row that was never bounded and is determined all the same has no alternative.
  const fixed = !found && !state.epsilon && !Number.isNaN(rows.certain(state.layer, state.head, query));
  const { lower = null, upper = null } = (fixed ? { lower: raw, upper: raw } : found?.at(state.epsilon)) ?? {};
  const widest = lower ? keys.reduce((most, key) => Math.max(most, upper[key] - lower[key]), 0) : NaN;
  const moved = state.moved?.query === query ? state.moved.row : null;
  const movable = Boolean(found?.movable && !state.epsilon && widest >= ROW_NARROW);
  return { query, head, found, raw, keys, lower, upper, widest, moved, movable, effective: head.row("effective", query) };
}
