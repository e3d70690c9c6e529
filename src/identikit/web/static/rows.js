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

  /** Add the rows of a file to those that are known. */
  add(view) {
    const places = view.array("rows.place");
    const n = view.array("rows.lower").shape[1];
    const part = (name, row) => view.array(name)?.data.subarray(row * n, (row + 1) * n) ?? null;
    const added = [];
    for (let row = 0; row < places.shape[0]; row += 1) {
      const [layer, head, query] = places.data.subarray(3 * row, 3 * row + 3);
      const entry = this.find(layer, head, query) ?? {
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
      added.push(entry);
      this.rows.set(`${layer},${head},${query}`, entry);
    }
    this.addVertices(view, added, n);
    this.addGrid(view, added, n);
  }

  addVertices(view, entries, n) {
    if (!view.has("vertex.row")) return;
    const [row, key, end, start, keys, weights] = ["row", "key", "end", "start", "keys", "weights"].map(
      (name) => view.array(`vertex.${name}`).data,
    );
    for (let at = 0; at < row.length; at += 1) {
      const make = () => {
        const vertex = new Float64Array(n);
        for (let entry = start[at]; entry < start[at + 1]; entry += 1) vertex[keys[entry]] = weights[entry];
        return vertex;
      };
      entries[row[at]].vertices.set(`${key[at]},${end[at] ? "upper" : "lower"}`, make);
    }
  }

  addGrid(view, entries, n) {
    if (!view.has("grid.row")) return;
    const [rows, lower, upper] = ["row", "lower", "upper"].map((name) => view.array(`grid.${name}`).data);
    view.about.rows.epsilons.forEach((epsilon, place, { length }) => {
      rows.forEach((row, at) => {
        const from = (at * length + place) * n;
        if (Number.isNaN(lower[from])) return;
        entries[row].grid.set(epsilon, { lower: lower.subarray(from, from + n), upper: upper.subarray(from, from + n) });
      });
    });
  }

  /** A row with its intervals, or null where it was not bounded. */
  find(layer, head, query) {
    const entry = this.rows.get(`${layer},${head},${query}`);
    if (!entry) return null;
    return {
      ...entry,
      movable: entry.vertices.size > 0,
      /** The ends for a place in `epsilons`; null where they are not known. */
      at: (place) => (place ? (entry.grid.get(this.epsilons[place]) ?? null) : { lower: entry.lower, upper: entry.upper }),
      /** The row with the same output that takes a key to an end of its interval; null where it is not known. */
      vertex: (key, end) => entry.vertices.get(`${key},${end}`)?.() ?? null,
      hasVertex: (key, end) => entry.vertices.has(`${key},${end}`),
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

  inOrder(condition) {
    const order = (row, other) => row.layer - other.layer || row.head - other.head || row.query - other.query;
    return [...this.rows.values()].filter(condition).sort(order);
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
