// The numbers and colours of one head's maps, filled row by row in short slices, so that a frame never waits for them.

import { diverging } from "./colour.js";
import { byWords } from "./head.js";

export const MAPS = ["raw", "effective", "simplex", "null"];

const SHEET_STEPS = 256; // colours on each side of 0
const SHEET_TINTS = new WeakMap();

/** Colours of the diverging scale as packed bytes: from -1 to 1 in equal steps of the root, then that of NaN. */
function sheetTints(colours) {
  if (!SHEET_TINTS.has(colours)) {
    const scale = diverging(colours);
    const found = new Uint32Array(2 * SHEET_STEPS + 2);
    for (let at = 0; at < found.length; at += 1) {
      const root = (at - SHEET_STEPS) / SHEET_STEPS;
      const [red, green, blue] = scale(at === found.length - 1 ? NaN : root * Math.abs(root));
      found[at] = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    }
    SHEET_TINTS.set(colours, found);
  }
  return SHEET_TINTS.get(colours);
}

/** Write the colours of some weights; NaN (a key that the query does not see) is the wash. */
function sheetTinted(weights, most, colours, into = new Uint32Array(weights.length), from = 0, to = weights.length) {
  const tints = sheetTints(colours);
  for (let at = from; at < to; at += 1) {
    const weight = weights[at];
    const root = Math.round(Math.sqrt(Math.min(1, Math.abs(weight) / (most || 1))) * SHEET_STEPS);
    into[at] = weight !== weight ? tints[2 * SHEET_STEPS + 1] : tints[SHEET_STEPS + (weight < 0 ? -root : root)];
  }
  return into;
}

/** Colours of one row of weights, four bytes each, for a pen's cells. */
export function tintedRow(weights, most, colours) {
  return new Uint8ClampedArray(sheetTinted(weights, most, colours).buffer);
}

export class MapSheet {
  constructor(head, shown) {
    this.head = head;
    this.shown = shown;
    this.size = shown.size; // rows
    this.across = shown.keys.size;
    this.all = head.maps ?? MAPS;
    this.maps = this.all.filter((map) => shown.size && shown.keys.size && head.row(map, shown.groups[0][0]) !== null);
    const many = this.size * this.across;
    this.weights = Object.fromEntries(this.maps.map((map) => [map, new Float32Array(many)]));
    this.sums = Object.fromEntries(this.maps.map((map) => [map, new Float64Array(this.across)]));
    this.outside = 0; // raw weight on keys that are not drawn, over the rows so far
    this.done = 0; // rows
    this.most = 0;
    this.images = null;
    this.plain = [...shown.groups, ...shown.keys.groups].every((group) => group.length === 1);
  }

  get finished() {
    return this.done === this.size;
  }

  /** Fill rows until the time is over; true when all are there. */
  work(milliseconds = Infinity) {
    const until = performance.now() + milliseconds;
    while (!this.finished && performance.now() < until) this.fill(this.done);
    return this.finished;
  }

  fill(at) {
    const seen = this.seen(at);
    for (const map of this.maps) {
      const row = this.row(map, at);
      const weights = this.weights[map];
      const sums = this.sums[map];
      for (let key = 0; key < this.across; key += 1) {
        const weight = seen[key] ? row[key] : NaN;
        weights[at * this.across + key] = weight;
        if (Number.isNaN(weight)) continue; // not seen, or one of a difference that is left out
        sums[key] += weight;
        if (weight > this.most || -weight > this.most) this.most = Math.abs(weight);
      }
      if (map === "raw") this.outside += this.missed(at, row);
    }
    this.done += 1;
  }

  /** The raw weight of a row that goes to keys which are not drawn. */
  missed(at, row) {
    const pieces = this.shown.groups[at];
    let total = 0;
    for (const piece of pieces) for (const weight of this.head.row("raw", piece)) total += weight / pieces.length;
    for (const weight of row) total -= weight;
    return Math.max(0, total);
  }

  /** One row of a map as it is drawn: keys of a word added up, queries of a word averaged; `instead` replaces a row. */
  row(map, at, instead = null) {
    const { groups, keys } = this.shown;
    const rowOf = (piece) => (instead?.query === piece ? instead.row : this.head.row(map, piece));
    if (this.plain) {
      const whole = rowOf(groups[at][0]);
      return Float64Array.from(keys.groups, ([key]) => whole[key]);
    }
    const parts = groups[at].map((piece) => byWords(rowOf(piece), keys.groups));
    return parts[0].map((_, key) => parts.reduce((sum, part) => sum + part[key], 0) / parts.length);
  }

  /** Which of the drawn keys a drawn query sees. */
  seen(at) {
    const { groups, keys: columns } = this.shown;
    if (!this.head.seen) return new Uint8Array(this.across).fill(1);
    const sees = (keys) => groups[at].some((query) => keys.some((key) => this.head.visible(query, key)));
    return Uint8Array.from(columns.groups, (keys) => (sees(keys) ? 1 : 0));
  }

  /** A row with NaN for keys that the query does not see, also before it was filled. */
  drawnRow(map, at, instead = null) {
    if (!instead && at < this.done) return this.weights[map].subarray(at * this.across, (at + 1) * this.across);
    const seen = this.seen(at);
    return this.row(map, at, instead).map((weight, key) => (seen[key] ? weight : NaN));
  }

  /** One weight; NaN where the query does not see the key, null where the map is not known. */
  at(map, query, key) {
    return this.maps.includes(map) ? this.drawnRow(map, query)[key] : null;
  }

  /** Who looks at a key: one number for each drawn query so far. */
  column(map, key) {
    return Float64Array.from({ length: this.done }, (_, query) => this.weights[map][query * this.across + key]);
  }

  /** What a key receives on average over the drawn queries so far. */
  mean(map, key) {
    return this.done ? this.sums[map][key] / this.done : NaN;
  }

  /** The largest such mean over all maps and keys, without its sign. */
  get mostMean() {
    let most = 0;
    for (const map of this.maps) for (const sum of this.sums[map]) most = Math.max(most, Math.abs(sum));
    return this.done ? most / this.done : 0;
  }

  /** The colours of a map, four bytes a cell, made again only for rows that are new or when the scale has grown. */
  image(map, colours) {
    if (this.images?.colours !== colours || this.images.most !== this.most) {
      this.images = { colours, most: this.most, rows: {}, packed: {}, bytes: {} };
    }
    const { rows, packed, bytes } = this.images;
    if (rows[map] !== this.done) {
      packed[map] ??= new Uint32Array(this.weights[map].length).fill(sheetTints(colours).at(-1));
      sheetTinted(this.weights[map], this.most, colours, packed[map], (rows[map] ?? 0) * this.across, this.done * this.across);
      bytes[map] = new Uint8ClampedArray(packed[map].buffer); // another object, so that pens make a new picture
      rows[map] = this.done;
    }
    return bytes[map];
  }

  /** The strongest edges of a map, at most about `count`, as places in its weights; kept for the next frame. */
  strongest(map, count) {
    if (this.edges?.map === map && this.edges.done === this.done) return this.edges.places;
    const weights = this.weights[map];
    const counts = new Int32Array(1025);
    const bin = (weight) => (weight ? Math.floor((Math.abs(weight) / this.most) * 1024) : 0);
    for (let at = 0; at < this.done * this.across; at += 1) counts[bin(weights[at])] += 1;
    let least = 1024;
    for (let found = counts[1024]; least > 1 && found + counts[least - 1] <= count; least -= 1) found += counts[least - 1];
    const places = [];
    for (let at = 0; at < this.done * this.across; at += 1) if (weights[at] && bin(weights[at]) >= least) places.push(at);
    this.edges = { map, done: this.done, places: places.slice(0, 2 * count) };
    return this.edges.places;
  }
}
