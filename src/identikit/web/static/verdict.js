// Verdict: the answers in words, and the text itself, each token shaded by how much of its attention is determined.
import { css, mixed } from "./colour.js";
import { canvasPen } from "./pen.js";
import { activeKey, activeQuery, callCode, choice, drawFigure, figureCanvas, figureWidth, headCode, headName, inkOn, intervalsCode, pointable, quoted, sampledCode, say, wordsWidth } from "./figure.js";
import { element, percent } from "./parts.js";

const STRIP_SIZE = 14; // of the letters
const STRIP_LINE = 30;
const STRIP_LEGEND = 30;
const STRIP_DARKEST = 0.85; // how much of the colour a determined token has

export class VerdictView {
  constructor(site) {
    this.site = site;
    this.id = "verdict";
    const { verdict } = site.view.about;
    this.title = verdict ? "Verdict" : "Text";
    const answers = "The answers in words, and below them the text: the darker a token, the more of its attention is determined by the output. ";
    this.help = `${verdict ? answers : ""}Click a token to follow it through all views.`;
    this.n = site.names.length;
    this.means = null; // determined shares over all heads
    this.laid = null;
    this.canvas = figureCanvas();
    this.readout = element("p", { class: "figure-readout" });
    this.whose = choice("Determined in", [["all", "all heads"], ["head", "this head"]], (strip) => site.store.set({ strip }));
    this.holder = element("div", { class: "figure-holder verdict-strip" }, this.canvas);
    const unsaid = site.view.about.keys ? "Rows are tokens of the target, and columns those of the source." : "Only the page of an explanation has answers in words.";
    const said = verdict?.sections.map(verdictSection) ?? [element("p", {}, unsaid)];
    const words = element("div", { class: "verdict-words" }, ...said);
    const scale = element("span", { class: "verdict-scale" }, "0%", element("i"), "100%");
    this.unbounded = element("span", { class: "verdict-scale" }, element("i", { class: "unbounded" }), "at least: not all rows were bounded");
    this.shades = element("div", { class: "figure-controls" }, "Determined in", this.whose.element, scale, this.unbounded);
    const text = element("div", {}, this.shades, this.holder, this.readout);
    this.element = element("div", { class: "verdict" }, words, text);
    this.listen();
  }

  unavailable() {
    const { about } = this.site.view;
    return about.tokens.length ? null : "There is no text to show.";
  }

  /** Whether anything is known of what is determined. */
  known() {
    return this.site.view.has("certain");
  }

  /** How much of each token's attention is determined at least, and at most, and the same in words. */
  certainty(state) {
    const { rows, view } = this.site;
    if (state.strip === "head") {
      const shares = this.site.names.map((_, query) => rows.certain(state.layer, state.head, query));
      return shares.map((share) => ({ share, most: share, said: Number.isNaN(share) ? null : percent(share) }));
    }
    if (this.means) return this.means;
    const known = view.array("tokens.certain")?.data ?? [];
    const said = view.about.certain?.tokens ?? [];
    this.means = this.site.names.map((_, query) => ({ share: known[query] ?? NaN, most: known[this.n + query] ?? NaN, said: said[query] }));
    return this.means;
  }

  /** Where each token stands: words wrap over lines, pieces of a word stand together. */
  places(width) {
    if (this.laid?.width === width) return this.laid;
    const { tokens, words } = this.site.view.about;
    const inside = new Set(words.flatMap(([start, stop]) => Array.from({ length: stop - start - 1 }, (_, at) => start + 1 + at)));
    let [x, y] = [0, 0];
    const boxes = tokens.map((token, place) => {
      const shown = stripShown(token, inside.has(place));
      const across = Math.min(width, wordsWidth(shown, STRIP_SIZE) + 8);
      if (x > 0) x += inside.has(place) ? 1 : 5;
      if (x > 0 && x + across > width) [x, y] = [0, y + STRIP_LINE];
      const box = { x, y, across, shown };
      x += across;
      return box;
    });
    this.laid = { width, boxes, height: y + STRIP_LINE };
    return this.laid;
  }

  /** An exported figure has its legend; on the page it stands beside the choice, where a long text does not scroll it away. */
  size() {
    const width = figureWidth(this.canvas);
    return [width, this.places(width).height + (this.known() ? STRIP_LEGEND : 0)];
  }

  /** Draw the tokens once, and then only what is marked: a long text has hundreds, and hovering must stay smooth. */
  draw(state) {
    const width = figureWidth(this.canvas);
    const { height } = this.places(width);
    const whose = state.strip === "head" ? `${state.layer},${state.head}` : "";
    const look = [width, this.site.theme(), whose, globalThis.devicePixelRatio].join();
    if (this.look !== look) {
      this.plain = document.createElement("canvas");
      this.paintTokens(canvasPen(this.plain, width, height), state, 0);
      this.look = look;
    }
    const paint = (pen) => {
      this.canvas.getContext("2d").drawImage(this.plain, 0, 0, width, height);
      this.paintMarks(pen, state, 0);
    };
    drawFigure(this.canvas, { size: () => [width, height], paint, describe: () => this.describe(state) }, state);
  }

  update(state, before) {
    if (this.unavailable()) return;
    this.draw(state);
    this.shades.hidden = !this.known();
    this.unbounded.hidden = !this.certainty(state).some(({ share, most }) => !(most - share < 1e-6));
    if (this.known()) this.whose.element.lastChild.textContent = headName(this.site.view, state);
    this.whose.press(state.strip);
    say(this.readout, this.words(state));
    if (!before || activeQuery(state) !== activeQuery(before)) this.reveal(activeQuery(state));
  }

  /** Scroll a long strip, and nothing else, to a token. */
  reveal(token) {
    const { y } = this.places(figureWidth(this.canvas)).boxes[token];
    const { scrollTop, clientHeight } = this.holder;
    if (y < scrollTop || y + STRIP_LINE > scrollTop + clientHeight) this.holder.scrollTop = y - clientHeight / 2;
  }

  words(state) {
    const query = activeQuery(state);
    const { said } = this.certainty(state)[query];
    const name = quoted(this.site.names[query]);
    if (!this.known()) return name;
    const where = state.strip === "head" ? `in ${headName(this.site.view, state)}` : "over all heads";
    if (!said) return `${name}: its attention was not bounded ${where}.`;
    return `${name}: how much of its attention is determined ${where}: ${said}.`;
  }

  paint(pen, state) {
    if (this.known()) this.paintLegend(pen, STRIP_LEGEND / 2, this.site.colours(), this.certainty(state));
    const top = this.known() ? STRIP_LEGEND : 0;
    this.paintTokens(pen, state, top);
    this.paintMarks(pen, state, top);
  }

  paintTokens(pen, state, top) {
    const colours = this.site.colours();
    const certain = this.certainty(state);
    this.places(pen.width).boxes.forEach(({ x, y: down, across, shown }, place) => {
      const y = top + down;
      const { share, most } = certain[place];
      const known = !Number.isNaN(share);
      const exact = known && most - share < 1e-6;
      const fill = mixed(colours.paper, colours.sure, known ? STRIP_DARKEST * share : 0);
      pen.rect(x, y + 3, across, STRIP_LINE - 8, css(fill), exact ? {} : { stroke: colours.faint });
      const ink = inkOn(fill, colours);
      pen.text(shown, x + 4, y + STRIP_LINE / 2 - 1, ink, { size: STRIP_SIZE, widest: across + 8 });
    });
  }

  paintMarks(pen, state, top) {
    const { focus } = this.site.colours();
    const { boxes } = this.places(pen.width);
    const [query, key] = [boxes[activeQuery(state)], this.site.view.about.keys ? null : boxes[activeKey(state)]]; // keys of another text are not here
    if (query) pen.rect(query.x, top + query.y + 2, query.across, STRIP_LINE - 6, null, { stroke: focus, line: 2 });
    const under = key && top + key.y + STRIP_LINE - 2;
    if (key) pen.line(key.x, under, key.x + key.across, under, focus, { width: 3 });
  }

  paintLegend(pen, y, colours, certain) {
    pen.text("0% determined", 0, y, colours.soft, { size: 11 });
    let x = wordsWidth("0% determined", 11) + 8;
    for (let step = 0; step <= 8; step += 1, x += 12) pen.rect(x, y - 5, 12, 10, css(mixed(colours.paper, colours.sure, (STRIP_DARKEST * step) / 8)));
    pen.text("100%", x + 8, y, colours.soft, { size: 11 });
    if (!certain.some(({ share, most }) => !(most - share < 1e-6))) return;
    x += 24 + wordsWidth("100%", 11);
    pen.rect(x, y - 5, 12, 10, null, { stroke: colours.faint });
    pen.text("at least: not all rows were bounded", x + 18, y, colours.soft, { size: 11 });
  }

  listen() {
    const { canvas, site } = this;
    const under = (x, y) => {
      const { boxes } = this.places(figureWidth(canvas));
      const token = boxes.findIndex((box) => x >= box.x - 3 && x < box.x + box.across + 3 && y >= box.y && y < box.y + STRIP_LINE);
      return token < 0 ? null : token;
    };
    const hover = (token) => {
      if ((token ?? -1) !== site.store.get().hoverQuery) site.store.set({ hoverQuery: token ?? -1 });
    };
    pointable(canvas, { under, hover, choose: (query) => site.store.set({ query }), press: (event) => this.press(event) });
  }

  press(event) {
    const { query } = this.site.store.get();
    const { boxes } = this.places(figureWidth(this.canvas));
    const line = (down) => {
      const [from, y] = [boxes[query], boxes[query].y + down * STRIP_LINE];
      const there = boxes.map((box, place) => [Math.abs(box.x - from.x), place]).filter(([, place]) => boxes[place].y === y);
      return there.sort(([one], [other]) => one - other)[0]?.[1] ?? query;
    };
    const keys = {
      ArrowLeft: () => query - 1, ArrowRight: () => query + 1, Home: () => 0, End: () => this.n - 1,
      ArrowUp: () => line(-1), ArrowDown: () => line(1), Escape: () => query,
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    this.site.store.set({ query: Math.max(0, Math.min(this.n - 1, keys[event.key]())), hoverQuery: -1 });
  }

  table(state) {
    const rows = this.certainty(state).map(({ share, most, said }, place) => [place, this.site.names[place], share, most, said ?? "not bounded"]);
    return { columns: ["position", "token", "determined share at least", "at most", "in words"], rows };
  }

  python(state) {
    const { view } = this.site;
    if (state.strip === "head" && view.about.attention) {
      return `row = ${intervalsCode(view, headCode(view, state))}\nprint(row.certain_mass)`;
    }
    const shares = this.known() ? [...sampledCode(view), "share = found.attention.intervals().certain_mass.mean((0, 1))", "print(share)"] : [];
    return [`found = ik.explain(model, text${callCode(view, "explain")})`, "print(found)", ...shares].join("\n");
  }

  describe(state) {
    const known = this.certainty(state).filter(({ share }) => !Number.isNaN(share));
    const shares = known.map(({ share }) => share);
    if (!shares.length) return `The text, ${this.n} tokens. ${this.words(state)}`;
    const [least, most] = [Math.min(...shares), Math.max(...known.map(({ most }) => most))].map(percent);
    const range = least === most ? least : `between ${least} and ${most}`;
    return `The text, ${this.n} tokens; ${range} of a token's attention is determined. ${this.words(state)}`;
  }
}

/** A token as it is read: without the marks of pieces, and something to see where it is only space. */
function stripShown(token, inside) {
  const plain = inside ? token.replace(/^##/, "") : token.trim();
  return plain.trim() ? plain : "␣";
}

/** One question with its answer; what follows the answer is folded. */
function verdictSection({ question, paragraphs }) {
  const [first, ...more] = paragraphs.filter(Boolean).map(verdictParagraph);
  const folded = more.length ? [element("details", {}, element("summary", {}, "More"), ...more)] : [];
  return element("section", {}, element("h3", {}, question), ...(first ? [first] : []), ...folded);
}

function verdictParagraph(paragraph) {
  if (typeof paragraph === "string") return element("p", {}, paragraph);
  const cells = (row, tag) => element("tr", {}, ...row.map((cell) => element(tag, {}, cell)));
  const head = element("thead", {}, cells(paragraph.columns, "th"));
  const body = element("tbody", {}, ...paragraph.rows.map((row) => cells(row, "td")));
  return element("div", { class: "verdict-table" }, element("table", {}, head, body));
}
