// One head's maps, built in the browser from the factors of the file: queries, keys, a basis of the values, and the
// coefficients of effective attention in it. Layers and heads are places in the file, not the model's numbers.

/** Every head of a file, each made when first asked for. */
export function headsOf(view) {
  const heads = new Map();
  return (layer, head) => {
    const name = `${layer},${head}`;
    if (!heads.has(name)) heads.set(name, new Head(view, layer, head));
    return heads.get(name);
  };
}

class Head {
  constructor(view, layer, head) {
    this.about = view.about.attention.layers[layer];
    this.n = view.about.tokens.length; // queries
    this.keys = (view.about.keys ?? view.about).tokens.length;
    this.part = (name) => view.array(`layer${layer}.${name}`);
    this.head = head;
    this.seen = view.array("visible")?.data.subarray(
      this.about.mask * this.n * Math.ceil(this.keys / 8),
      (this.about.mask + 1) * this.n * Math.ceil(this.keys / 8),
    );
    this.rows = new Map();
    this.simplexMap = null;
  }

  /** Whether a query sees a key. */
  visible(query, key) {
    return !this.seen || (this.seen[query * Math.ceil(this.keys / 8) + (key >> 3)] >> (7 - (key & 7))) & 1;
  }

  /** A row of a map ("raw", "effective", "simplex" or "null") over all keys; null where it is not known. */
  row(map, query) {
    const name = `${map},${query}`;
    if (!this.rows.has(name)) {
      const row = this.makeRow(map, query);
      if (row === null) return null;
      this.rows.set(name, row);
    }
    return this.rows.get(name);
  }

  makeRow(map, query) {
    if (map === "null") {
      const [raw, effective] = [this.row("raw", query), this.row("effective", query)];
      return effective && raw.map((weight, key) => weight - effective[key]);
    }
    const dense = map === "simplex" && this.simplexMap ? this.simplexMap : this.part(map);
    if (dense) {
      const offset = dense === this.simplexMap ? 0 : this.head * this.n * this.keys;
      return Float64Array.from(dense.data.subarray(offset + query * this.keys, offset + (query + 1) * this.keys));
    }
    if (map === "raw") return this.part("query") ? this.rawRow(query) : null;
    return map === "effective" && this.part("coefficients") ? this.effectiveRow(query) : null;
  }

  /** softmax(scaling · q·k), with a soft-cap and a learned sink where the model has them. */
  rawRow(query) {
    const { scaling, softcap, sink } = this.about;
    const scores = this.products(this.part("query"), query, this.part("key"), this.about.key_head);
    let largest = sink ? sink[this.head] : -Infinity;
    for (let key = 0; key < this.keys; key += 1) {
      scores[key] *= scaling;
      if (softcap) scores[key] = Math.tanh(scores[key] / softcap) * softcap;
      if (!this.visible(query, key)) scores[key] = -Infinity;
      largest = Math.max(largest, scores[key]);
    }
    let total = sink ? Math.exp(sink[this.head] - largest) : 0;
    for (let key = 0; key < this.keys; key += 1) {
      scores[key] = Math.exp(scores[key] - largest);
      total += scores[key];
    }
    return largest === -Infinity ? scores.fill(0) : scores.map((score) => score / total);
  }

  effectiveRow(query) {
    if (this.part("identifiable").data[this.head * this.n + query]) return this.row("raw", query);
    const row = this.products(this.part("coefficients"), query, this.part("basis"), this.about.basis_head);
    return row.map((weight, key) => (this.visible(query, key) ? weight : 0));
  }

  /** The products of one head's row of `left` with all rows of `right` that the head uses. */
  products(left, query, right, group) {
    const width = left.shape[2];
    const from = (this.head * this.n + query) * width;
    const start = group[this.head] * this.keys * width;
    const products = new Float64Array(this.keys);
    const a = left.data;
    const b = right.data;
    for (let key = 0; key < this.keys; key += 1) {
      let sum = 0;
      const at = start + key * width;
      for (let i = 0; i < width; i += 1) sum += a[from + i] * b[at + i];
      products[key] = sum;
    }
    return products;
  }

  /** How far other weights move the head's output, relative to its length; null where the file does not hold values. */
  outputChange(query, weights) {
    const basis = this.part("basis");
    const through = this.part("through");
    if (!basis || !through) return null;
    const raw = this.row("raw", query);
    const length = (row) => {
      const width = basis.shape[2];
      const inside = new Float64Array(width);
      for (let key = 0; key < this.keys; key += 1) {
        const at = (this.about.basis_head[this.head] * this.keys + key) * width;
        for (let i = 0; row[key] !== 0 && i < width; i += 1) inside[i] += row[key] * basis.data[at + i];
      }
      const [, , outer] = through.shape;
      let square = 0;
      for (let j = 0; j < outer; j += 1) {
        let sum = 0;
        for (let i = 0; i < width; i += 1) sum += inside[i] * through.data[(this.head * width + i) * outer + j];
        square += sum * sum;
      }
      return Math.sqrt(square);
    };
    const moved = length(raw.map((weight, key) => weights[key] - weight));
    return moved && moved / length(raw);
  }
}

/** Gather a row or a map of pieces into words: what pieces receive is added up, what they do is averaged. */
export function byWords(row, groups) {
  return Float64Array.from(groups, (group) => group.reduce((sum, piece) => sum + row[piece], 0));
}
