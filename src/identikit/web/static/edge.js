// Edge: how far each weight of one row could go while the head's output stays the same, and a hand on it.
import { barAt, barOrder, barScale, barsHeight, canPull, paintBars } from "./bars.js";
import { callCode, activeKey, activeQuery, choice, drawFigure, figureCanvas, figureWidth, headCode, headName, intervalsCode, pointOn, quoted, say, slider } from "./figure.js";
import { button, element, number, percent } from "./parts.js";
import { ROW_NARROW, activeRow } from "./rows.js";

const EDGE_MOST = 24; // bars that are shown at first
const EDGE_ROUNDING = 1e-5; // an output that moves by less moved by rounding

export class EdgeView {
  constructor(site) {
    this.site = site;
    this.id = "edge";
    this.title = "Edge";
    this.help =
      "Each bar is a key: its weight could lie anywhere on the bar without the head's output changing. Drag an end of a bar, and the row follows.";
    this.all = false;
    this.asked = ""; // the row that was last asked of a server
    this.inModel = null; // what a server measured, for the move it belongs to
    this.grabbed = null;
    this.build();
    this.listen();
  }

  build() {
    const { store } = this.site;
    this.canvas = figureCanvas();
    this.says = element("p", { class: "figure-says" });
    this.sort = choice("Sort by", [["weight", "by weight"], ["width", "by width"], ["text", "in the text"]], (sort) => store.set({ sort }));
    const most = this.site.rows.epsilons.length - 1;
    this.epsilon = slider("ε", { least: 0, most, step: 1 }, (epsilon) => store.set({ epsilon, moved: null }));
    this.more = button("", "", () => ((this.all = !this.all), store.set({})));
    this.more.classList.add("edge-more");
    this.readout = element("p", { class: "figure-readout" });
    this.ends = { lower: button("Lower end", "", () => this.pull("lower", 1)), upper: button("Upper end", "", () => this.pull("upper", 1)) };
    this.share = slider("Between the ends", { least: -100, most: 100, step: 1 }, (hundredths) => this.slide(hundredths / 100));
    this.share.input.addEventListener("change", () => this.measure());
    this.reset = button("Reset", "Back to raw attention (Escape)", () => this.letGo());
    const pulls = element("div", { class: "edge-pulls" }, this.ends.lower, this.share.input, this.ends.upper, this.reset);
    this.change = element("p", { class: "edge-change" });
    this.note = element("p", { class: "figure-note" });
    this.listed = element("div", { class: "edge-listed" });
    this.element = element(
      "div", { class: "edge" }, this.says,
      element("div", { class: "figure-controls" }, this.sort.element, this.epsilon.element), this.note, this.listed,
      element("div", { class: "edge-hand" }, pulls, element("div", { class: "edge-words" }, this.readout, this.change)),
      element("div", { class: "figure-holder" }, this.canvas), this.more,
    );
  }

  unavailable() {
    const { about } = this.site.view;
    return about.attention ? null : (about.unavailable?.attention ?? "This page was made without attention.");
  }

  row(state) {
    return activeRow(this.site, state);
  }

  look(state, row, width) {
    const { keyNames: names } = this.site;
    const order = barOrder(row, state.sort, this.all ? Infinity : EDGE_MOST, state.key);
    return {
      ...order, names, scale: barScale(row, order.shown, names, width), colours: this.site.colours(), active: activeKey(state),
      grabbed: this.grabbed ?? (row.moved && state.moved),
    };
  }

  size() {
    const most = this.all ? Infinity : EDGE_MOST; // of the text, not of the row: the page must not jump while hovering
    const count = Math.min(most, this.site.keyNames.length);
    return [figureWidth(this.canvas), barsHeight(count)];
  }

  paint(pen, state) {
    const row = this.row(state);
    paintBars(pen, row, this.look(state, row, pen.width));
  }

  update(state) {
    if (this.unavailable()) return;
    const row = this.row(state);
    this.fetch(state, row);
    drawFigure(this.canvas, this, state);
    const { hidden, largest } = barOrder(row, state.sort, this.all ? Infinity : EDGE_MOST, state.key);
    say(this.says, this.sentence(state, row));
    this.sort.press(state.sort);
    const what = state.sort === "width" && row.lower ? "wide" : "each";
    const more = hidden ? `${hidden} more, at most ${largest.toFixed(3)} ${what}: show all` : "";
    this.more.textContent = this.all && row.keys.length > EDGE_MOST ? `Show only the ${EDGE_MOST} largest` : more;
    this.more.classList.toggle("nothing", !this.more.textContent); // its place is kept: the page must not jump
    say(this.readout, row.moved && activeKey(state) === state.moved.key ? "" : this.numbers(state, row));
    this.showEpsilon(state);
    this.showPulls(state, row);
    this.showListed(state, this.row({ ...state, hoverQuery: -1 }));
  }

  sentence(state, row) {
    if (!row.raw) return `${headName(this.site.view, state)}, ${quoted(this.site.names[row.query])}: this row was not computed.`;
    const name = `${headName(this.site.view, state)}, ${quoted(this.site.names[row.query])} sees ${row.keys.length} ${row.keys.length === 1 ? "key" : "keys"}.`;
    if (!row.lower) return name;
    if (row.widest < ROW_NARROW) return `${name} It is determined by the output: it has no alternative.`;
    const certain = row.keys.reduce((sum, key) => sum + row.lower[key], 0);
    const strongest = row.keys.reduce((best, key) => (row.raw[key] > row.raw[best] ? key : best), row.keys[0]);
    const sure = {
      1: ` Its strongest edge, to ${quoted(this.site.keyNames[strongest])}, is determined.`,
      0: " In some alternative another edge is the strongest.",
    }[state.epsilon ? NaN : row.found.strongest];
    return `${name} ${percent(certain)} of it is determined by the output.${sure ?? ""}`;
  }

  /** The numbers of the active bar. */
  numbers(state, row) {
    const key = activeKey(state);
    if (key < 0) return "";
    if (!row.keys.includes(key)) return `${quoted(this.site.names[row.query])} does not see ${quoted(this.site.keyNames[key])}.`;
    const moved = row.moved ? `, moved to ${row.moved[key].toFixed(3)}` : "";
    const range = row.lower ? `, between ${row.lower[key].toFixed(3)} and ${row.upper[key].toFixed(3)}` : "";
    const effective = row.effective ? `, effective ${row.effective[key].toFixed(3)}` : "";
    return `${quoted(this.site.keyNames[key])}: raw ${row.raw[key].toFixed(3)}${moved}${range}${effective}.`;
  }

  showEpsilon(state) {
    const { rows, source } = this.site;
    const { epsilons } = rows;
    this.epsilon.element.hidden = !(source.live ? epsilons.length > 1 : rows.withGrid().length);
    this.epsilon.input.value = state.epsilon;
    const share = epsilons[state.epsilon] ?? 0;
    const words = share ? `the output may move by ${Number((100 * share).toPrecision(2))}%` : "the output stays the same";
    say(this.epsilon.words, words);
    this.epsilon.element.title = "How far the head's output may move, as a share of its length.";
    this.epsilon.input.setAttribute("aria-valuetext", words);
  }

  showPulls(state, row) {
    const { moved } = state;
    const open = (end) => row.movable && row.keys.includes(state.key) && canPull(row, state.key, end);
    for (const [end, made] of Object.entries(this.ends)) {
      made.disabled = !open(end);
      made.title = made.disabled ? "Choose a bar with handles first." : `Move ${quoted(this.site.keyNames[state.key])} there.`;
    }
    this.share.input.disabled = !open("lower") && !open("upper");
    this.share.input.value = row.moved ? Math.round(100 * moved.share * (moved.end === "lower" ? -1 : 1)) : 0;
    this.reset.disabled = !row.moved;
    say(this.change, row.moved ? this.changeWords(row, moved) : this.howWords(state, row, open("lower") || open("upper")));
    this.change.classList.toggle("moved", Boolean(row.moved));
    this.element.classList.toggle("still", !row.movable);
  }

  /** How a row is moved, or why it is not. */
  howWords(state, row, open) {
    if (state.epsilon && row.found?.movable) return "Bars can be dragged at ε = 0, where the output stays the same.";
    if (!row.movable) return "";
    if (row.keys.includes(state.key) && !open) return `${quoted(this.site.keyNames[state.key])} cannot be dragged here: choose a bar with handles.`;
    return "Drag a handle, or choose a bar with the arrow keys and press l or u for its lower or upper end.";
  }

  changeWords(row, moved) {
    const change = row.head.outputChange(row.query, moved.row);
    const name = quoted(this.site.keyNames[moved.key]);
    const way = moved.share < 0.995 ? `, ${Math.round(100 * moved.share)}% of the way to its ${moved.end} end` : `, its ${moved.end} end`;
    const from = `${name} moved from ${row.raw[moved.key].toFixed(3)} to ${moved.row[moved.key].toFixed(3)}${way}.`;
    const told =
      change === null
        ? "This file holds no values, so the change in the output cannot be measured here."
        : `The head's output moved by ${number(change)} of its length${change < EDGE_ROUNDING ? ", which is rounding" : ""}.`;
    const same = this.inModel?.head === row.head && ["query", "key", "end"].every((name) => this.inModel[name] === moved[name]);
    if (!same) return `${from} ${told}`;
    const { hidden, logits } = this.inModel.change;
    const more = logits === null ? "" : ` and the logits by ${number(logits)}`;
    return `${from} ${told} In the model, the row at that end changes the final hidden states by ${number(hidden)}${more}, relative to their largest entry.`;
  }

  /** Say what a file does not have of this row, and offer rows of which it does. */
  showListed(state, row) {
    const { words, listed, button: name } = this.offer(state, row);
    say(this.note, words);
    const now = [words, ...listed.map(name)].join("\n");
    if (this.listedNow === now) return;
    this.listedNow = now;
    const open = ({ layer, head, query }) => () => this.site.store.set({ layer, head, query, hoverQuery: -1 });
    this.listed.replaceChildren(...listed.map((one) => button(name(one), "Open this row", open(one))));
    if (listed.length && !this.site.view.about.images) this.listed.append(element("span", {}, "(identikit serve has all rows.)"));
  }

  /** What to say about a row that lacks something, which rows have it, and what their buttons say. */
  offer(state, row) {
    const { rows, source, view, names } = this.site;
    const nothing = { words: "", listed: [], button: () => "" };
    if (source.live) return nothing;
    if (state.epsilon) {
      if (row.lower) return nothing;
      const name = (one) => `${headName(view, one)} ${names[one.query]}`;
      return { words: "This file has no intervals for this ε in this row. It has them for these rows:", listed: rows.withGrid(), button: name };
    }
    if (row.found?.movable || row.widest < ROW_NARROW) return nothing;
    if (view.about.calls?.looking) {
      const words = row.lower ? "" : "This file has no intervals. In Python, attention.intervals(…).save_html(path) writes a page that has them.";
      return { ...nothing, words };
    }
    const listed = rows.movable(state.layer, state.head);
    const missing = row.lower ? "" : "This file has no intervals for this row. ";
    const words = listed.length ? "These rows of the head can be dragged:" : `No row of this head can be dragged here.${view.about.images ? "" : " identikit serve can move any row."}`;
    return { words: missing + words, listed, button: (one) => names[one.query] };
  }

  /** Ask a server for the pinned row, once. */
  fetch(state, row) {
    const { source, store, task } = this.site;
    const known = state.epsilon ? row.lower : row.found?.movable || row.widest < ROW_NARROW;
    const name = [state.layer, state.head, state.query, state.epsilon].join();
    if (!source.live || known || row.query !== state.query || this.asked === name) return;
    this.asked = name;
    task(this.id, source.rows(state.layer, state.head, state.query, state.epsilon).then(() => store.set({})), "Finding the intervals of this row…");
  }

  /** Move the row to a share of the way from raw attention to the vertex at one end of the pinned bar. */
  pull(end, share) {
    const state = this.site.store.get();
    const row = this.row({ ...state, hoverQuery: -1 });
    if (!end || !row.movable || !row.keys.includes(state.key) || !canPull(row, state.key, end)) return;
    const vertex = row.found.vertex(state.key, end);
    if (!vertex) return;
    const inside = Math.min(1, Math.max(0, share));
    const weights = row.raw.map((weight, key) => weight + inside * (vertex[key] - weight));
    this.site.store.set({ moved: { row: weights, query: state.query, key: state.key, end, share: inside } });
    if (inside === 1 && !this.grabbed) this.measure();
  }

  /** Let a server put the row into the model. */
  measure() {
    const { heads, source, store, task } = this.site;
    const { layer, head, moved } = store.get();
    if (!source.live || !moved) return;
    const { query, key, end } = moved;
    const found = source.move({ layer, head, query, key, end }).then(({ output_change: change }) => {
      this.inModel = { head: heads(layer, head), query, key, end, change };
      store.set({});
    });
    task(this.id, found, "Putting the row into the model…");
  }

  /** Move the row to a place between the two ends, raw attention being in the middle. */
  slide(place) {
    if (Math.abs(place) < 0.005) this.letGo();
    else this.pull(place < 0 ? "lower" : "upper", Math.abs(place));
  }

  letGo() {
    this.grabbed = null;
    this.inModel = null;
    this.site.store.set({ moved: null });
    this.site.announce("The row is as the model computed it.");
  }

  listen() {
    const { canvas, site } = this;
    const under = (event) => {
      const state = site.store.get();
      const row = this.row(state);
      const { shown, scale } = this.look(state, row, figureWidth(canvas));
      return { state, row, scale, at: barAt(row, shown, scale, ...pointOn(canvas, event)) };
    };
    canvas.addEventListener("pointerdown", (event) => {
      const { at, state } = under(event);
      if (!at) return;
      site.store.set({ key: at.key, query: activeQuery(state), hoverKey: -1, moved: at.key === state.key ? state.moved : null });
      if (!at.end) return;
      this.grabbed = at;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const { at, row, scale } = under(event);
      if (this.grabbed) {
        const { key, end } = this.grabbed;
        return this.pull(end, (scale.weight(pointOn(canvas, event)[0]) - row.raw[key]) / (row[end][key] - row.raw[key]));
      }
      canvas.style.cursor = at?.end ? "ew-resize" : at ? "pointer" : "";
      if ((at?.key ?? -1) !== site.store.get().hoverKey) site.store.set({ hoverKey: at?.key ?? -1 });
    });
    const drop = () => {
      if (!this.grabbed) return;
      this.grabbed = null;
      this.measure();
      site.announce(this.change.textContent);
      site.store.set({});
    };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", () => !this.grabbed && site.store.set({ hoverKey: -1 }));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const { store } = this.site;
    const state = store.get();
    const { shown } = this.look(state, this.row(state), figureWidth(this.canvas));
    const at = shown.indexOf(state.key);
    const to = { ArrowDown: at + 1, ArrowUp: Math.max(0, at - 1), Home: 0, End: shown.length - 1 }[event.key];
    if (to !== undefined) store.set({ key: shown[Math.min(to, shown.length - 1)], moved: null });
    else if (event.key === "l" || event.key === "u") this.pull(event.key === "l" ? "lower" : "upper", 1);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.slide(Number(this.share.input.value) / 100 + (event.key === "ArrowLeft" ? -0.1 : 0.1));
    else if (event.key === "Escape") this.letGo();
    else return;
    event.preventDefault();
  }

  table(state) {
    const row = this.row(state);
    const { keyNames: names } = this.site;
    const columns = ["position", "key", "raw", "lower", "upper", "effective", ...(row.moved ? ["moved"] : [])];
    const rows = row.keys.map((key) => [
      key, names[key], row.raw[key], row.lower?.[key] ?? NaN, row.upper?.[key] ?? NaN, row.effective?.[key] ?? NaN,
      ...(row.moved ? [row.moved[key]] : []),
    ]);
    return { columns, rows };
  }

  python(state) {
    const query = activeQuery(state);
    const where = `${headCode(this.site.view, state)}, query=${query}`;
    const [cut, given] = ["text", "attention"].map((name) => callCode(this.site.view, name));
    const epsilon = this.site.rows.epsilons[state.epsilon];
    const lines = [`row = ${intervalsCode(this.site.view, where, epsilon ? `, epsilon=${epsilon}` : "")}`, "print(row.to_frame())"];
    if (this.row(state).effective) lines.push(`effective = ik.effective_attention(model, text${given}).sel(${where}).effective`);
    if (state.moved?.query === query) {
      const { key, end, share } = state.moved;
      lines.push(`other = ik.alternative_attention(model, text, ${where}, toward=${key}, end="${end}"${cut})`, "print(other)");
      lines.push(`moved = other.raw + ${share} * (other.attention - other.raw)`);
    }
    return lines.join("\n");
  }

  describe(state) {
    const row = this.row(state);
    const moved = row.moved ? ` ${this.changeWords(row, state.moved)}` : "";
    return [this.sentence(state, row), this.numbers(state, row)].filter(Boolean).join(" ") + moved;
  }
}
