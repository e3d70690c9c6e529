// The attention of one head: raw, effective, simplex and null as maps or lines, and the text shaded both ways.

import { canvasPen } from "./pen.js";
import { linesAt, linesHeight, paintLines, LINES_DRAWN } from "./lines.js";
import { matrixAt, matrixLayout, paintMatrix } from "./matrix.js";
import { element, number } from "./parts.js";
import { MeasuredHead, headMeasure, measureEnds } from "./measures.js";
import { MAPS, MapSheet } from "./sheet.js";
import { isSpecial, shownTokens, windowStart, WINDOW } from "./shown.js";
import { callCode, choice, figureCanvas, headCode, headName, pickList, pointable, quoted, say, slider, tickBox, tiny } from "./figure.js";
import { attentionStrips } from "./strips.js";

const ATTENTION_SLICE = 8; // milliseconds of work between two frames
const ATTENTION_PATIENCE = 250; // milliseconds that a head stays chosen before a server is asked for its simplex map
const ATTENTION_WIDTH = 960; // of an exported figure

export class AttentionView {
  constructor(site) {
    this.site = site;
    this.id = "attention";
    this.title = "Attention";
    this.help = "A row is what one token looks at, a column who looks at it. All maps share one colour scale.";
    this.book = sheetBook(site);
    this.last = null; // one frame asks for the same picture three times
    this.canvas = figureCanvas();
    this.controls = attentionControls(site);
    this.strips = attentionStrips(site);
    this.read = element("p", { className: "maps-read" });
    this.notes = element("p", { className: "maps-notes" });
    const parts = [this.controls.element, this.canvas, this.read, this.strips.element, this.notes];
    this.element = element("div", { className: "maps" }, ...parts);
    attentionPointer(site, this.canvas, () => this.book.sheet(site.store.get()));
  }

  unavailable() {
    const { attention, unavailable } = this.site.view.about;
    if (!attention) return unavailable?.attention ?? "This page holds no attention.";
    const some = attention.layers.some(({ form }) => form !== "none");
    return some ? null : "This page holds intervals, but not the maps.";
  }

  picture(state) {
    const sheet = this.book.sheet(state);
    const same = this.last?.state === state && this.last.sheet === sheet && this.last.colours === this.site.colours();
    if (!same) this.last = attentionPicture(this.site, sheet, state);
    return this.last;
  }

  update(state, before) {
    if (this.unavailable()) return;
    if (attentionFollow(this.site, state, before)) return; // the window moves first; another update comes
    const drawn = this.picture(state);
    const width = Math.max(280, this.element.clientWidth || 640);
    const height = attentionHeight(width, state, drawn.sheet);
    this.canvas.style.height = `${height}px`;
    this.paint(canvasPen(this.canvas, width, height), state);
    this.controls.update(state, drawn);
    this.strips.update(state, drawn);
    say(this.read, attentionRead(this.site, drawn));
    say(this.notes, attentionNotes(this.site, state, drawn).join(" "));
    this.canvas.setAttribute("aria-label", this.describe(state));
    this.book.work(state, () => this.update(this.site.store.get()));
  }

  paint(pen, state) {
    const drawn = this.picture(state);
    if (!drawn.sheet.size || !drawn.sheet.across) pen.text("No tokens are left to draw.", 12, 24, drawn.colours.soft);
    else if (state.shape === "lines") paintLines(pen, drawn);
    else paintMatrix(pen, drawn);
  }

  size(state) {
    return [ATTENTION_WIDTH, attentionHeight(ATTENTION_WIDTH, state, this.book.sheet(state))];
  }

  /** Every number of the maps; kept for the next time. */
  table(state) {
    const sheet = this.book.sheet(state);
    if (sheet.table) return sheet.table;
    sheet.work();
    const { labels, keys } = sheet.shown;
    const rows = [];
    for (let query = 0; query < sheet.size; query += 1) {
      for (let key = 0; key < sheet.across; key += 1) {
        const weights = sheet.all.map((map) => sheet.at(map, query, key));
        if (!Number.isNaN(weights[0])) rows.push([labels[query], keys.labels[key], ...weights]);
      }
    }
    sheet.table = { columns: ["query", "key", ...sheet.all], rows };
    return sheet.table;
  }

  python(state) {
    const { view } = this.site;
    const { shown, all } = this.book.sheet(state);
    const measure = headMeasure(this.site, state);
    const [name, call] = measure ? ["measure", measure.code] : ["attention", `ik.effective_attention(model, text${callCode(view, "attention")})`];
    const lines = [`${name} = ${call}`, `head = ${name}.sel(${headCode(view, state)})`];
    if (shown.byWord || shown.keys.byWord) lines.push(`head = head.words()${measure ? "" : "  # simplex exists for pieces only"}`);
    const maps = all.filter((map) => !(shown.byWord || shown.keys.byWord) || map !== "simplex").map((map) => `head.${map}`);
    lines.push(`maps = [${maps.join(", ")}]`);
    if (shown.size < shown.all || shown.keys.size < shown.keys.all) {
      const keys = shown.keys === shown ? "drawn" : `[${shown.keys.order.join(", ")}]`;
      lines.push(`drawn = [${shown.order.join(", ")}]`, `maps = [part[drawn][:, ${keys}] for part in maps]`);
    }
    return [...lines, "head.plot()"].join("\n");
  }

  describe(state) {
    const drawn = this.picture(state);
    const count = ({ size, byWord }) => `${size} ${byWord ? "words" : "tokens"}`;
    const { keys } = drawn.shown;
    const many = keys === drawn.shown ? count(keys) : `${count(drawn.shown)} that look at ${count(keys)} of the source`;
    return `Attention of ${drawn.name} over ${many}. ${attentionRead(this.site, drawn)}`;
  }
}

/** What a reader can choose: matrix or lines, which map, words, special tokens, the window of a long text. */
function attentionControls(site) {
  const { about } = site.view;
  const texts = [about, about.keys ?? about];
  const n = Math.max(...texts.map(({ tokens }) => tokens.length)); // the longer one, whose window is moved
  const set = (name) => (value) => site.store.set({ [name]: value });
  const shape = choice("Shape", [["matrix", "Matrix"], ["lines", "Lines"]], set("shape"));
  const measures = site.measures.filter(({ perHead }) => perHead);
  const measure = pickList("Read as", [["", "weights"], ...measures.map(({ name, label }) => [name, label])], set("measure"));
  const map = pickList("Lines and text show", [], set("map"));
  const words = tickBox("Words", set("words"));
  const first = about.attention?.special_group === "first token";
  const special = tickBox(first ? "First token" : "Special tokens", set("special"));
  const worded = texts.some(({ words: spans }) => spans.length);
  words.box.disabled = !worded;
  words.element.title = worded
    ? "Add up what the pieces of a word receive, and average what they do."
    : "The tokens of this text are not aligned with words.";
  special.box.disabled = !texts.some((text) => text.tokens.some((_, at) => isSpecial(about, at, text)));
  special.element.title = "Draw their rows and columns, and let them count for the scale of colours.";
  const slide = slider("Window", { least: 0, most: Math.max(0, n - WINDOW), step: 1 }, set("from"));
  return {
    element: element("div", { className: "maps-controls" }, shape.element, ...(measures.length ? [measure.element] : []), map.element, words.element, special.element,
      ...(n > WINDOW ? [slide.element] : [])),
    update(state, drawn) {
      const { all } = drawn.sheet;
      if (map.names !== all) map.list.replaceChildren(...all.map((name) => element("option", { value: name, textContent: name })));
      map.names = all;
      measure.list.value = headMeasure(site, state)?.name ?? "";
      shape.press(state.shape === "lines" ? "lines" : "matrix");
      map.list.value = drawn.map;
      words.box.checked = state.words && worded;
      special.box.checked = state.special;
      const from = windowStart(n, state.from);
      slide.input.value = from;
      say(slide.words, `tokens ${from} to ${Math.min(n, from + WINDOW) - 1} of ${n}`);
    },
  };
}

/** The sheet of the chosen head, filled in idle slices; the rows of a head that was left are forgotten. */
function sheetBook(site) {
  let [name, current, waiting, asked] = ["", null, false, new Set()];
  const book = {
    sheet(state) {
      const head = site.heads(state.layer, state.head);
      const measure = headMeasure(site, state);
      const shape = `${measure?.name},${windowStart(Math.max(head.n, head.keys), state.from)},${state.words},${state.special},${Boolean(head.simplexMap)}`;
      if (name !== `${state.layer},${state.head},${shape}`) {
        if (current && current.head !== head) current.head.rows.clear();
        name = `${state.layer},${state.head},${shape}`;
        current = new MapSheet(measure ? new MeasuredHead(head, measure, state) : head, shownTokens(site, state));
      }
      return current;
    },
    work(state, redraw) {
      book.ask(state, redraw);
      if (waiting || current.finished) return;
      waiting = true;
      const idle = globalThis.requestIdleCallback ?? ((done) => setTimeout(done, 0));
      idle(() => {
        waiting = false;
        current.work(ATTENTION_SLICE);
        redraw();
      }, { timeout: 100 });
    },
    /** Ask a server for the simplex map of a head that stays chosen. */
    ask({ layer, head }, redraw) {
      const wanted = `${layer},${head}`;
      if (!site.source?.live || current.all !== MAPS || current.maps.includes("simplex") || asked.has(wanted)) return;
      asked.add(wanted);
      setTimeout(() => {
        const state = site.store.get();
        if (state.layer !== layer || state.head !== head) return asked.delete(wanted);
        const answer = site.source.simplex(layer, head);
        site.task("attention", answer, "Computing the attention of least norm…");
        return answer.then(redraw, () => {}); // the shell says what failed
      }, ATTENTION_PATIENCE);
    },
  };
  return book;
}

/** Everything that the painters draw, in drawn places: names, cursor, whose lines stand out, certainty, a moved row. */
function attentionPicture(site, sheet, state) {
  const { shown } = sheet;
  const place = (position, among = shown) => (position >= 0 ? among.place[position] ?? -1 : -1);
  const hovering = state.hoverQuery >= 0 || state.hoverKey >= 0;
  const cursor = {
    query: place(state.hoverQuery >= 0 ? state.hoverQuery : state.query),
    key: place(state.hoverKey >= 0 ? state.hoverKey : hovering ? -1 : state.key, shown.keys),
  };
  const onlyKey = state.hoverKey >= 0 && state.hoverQuery < 0;
  const measure = headMeasure(site, state);
  const movedAt = !measure && state.moved && place(state.moved.query);
  const moved = movedAt >= 0 && state.moved ? { at: movedAt, row: sheet.row("raw", movedAt, state.moved) } : null;
  return {
    sheet, shown, cursor, moved, state,
    certain: attentionCertain(site, sheet, state),
    name: headName(site.view, state) + (measure ? ` by ${measure.label}` : ""),
    what: measure?.label ?? "weight",
    map: sheet.all.includes(state.map) ? state.map : "raw",
    labels: shown.labels,
    keyLabels: shown.keys.labels,
    strong: onlyKey ? { query: -1, key: cursor.key } : { query: cursor.query, key: -1 },
    colours: site.colours(),
    missing: (map) => attentionMissing(site, state, map),
  };
}

/** How much of each drawn row is determined, NaN where that is not known; kept until rows are added. */
function attentionCertain(site, sheet, state) {
  const { layer, head } = state;
  const measure = headMeasure(site, state);
  if (sheet.certain?.rows !== site.rows.rows?.size) {
    const certain = (piece) => (measure ? measure.certain(piece, layer, head) : site.rows.certain(layer, head, piece));
    const shares = sheet.shown.groups.map((group) => {
      const known = group.map(certain).filter((share) => share >= 0);
      return known.length ? known.reduce((sum, share) => sum + share, 0) / known.length : NaN;
    });
    sheet.certain = { rows: site.rows.rows?.size, shares };
  }
  return sheet.certain.shares;
}

function attentionHeight(width, state, sheet) {
  if (!sheet.size || !sheet.across) return 48;
  return state.shape === "lines" ? linesHeight(Math.max(sheet.size, sheet.across)) : matrixLayout(width, sheet).height;
}

function attentionMissing(site, state, map) {
  if (map === "simplex" && site.source?.live) return "Being computed.";
  if (map !== "simplex") return "This file does not hold it.";
  const code = `attention.sel(${headCode(site.view, state)}).simplex`;
  return `Not in this file: it takes one quadratic program per row. In Python: ${code}${site.view.about.keys || site.view.about.images ? "" : ", or open the text with identikit serve"}.`;
}

/** Move the window to a token that was pinned elsewhere; true when it had to move. */
function attentionFollow(site, state, before) {
  const n = site.view.about.tokens.length;
  const from = windowStart(n, state.from);
  if (!before || before.query === state.query || n <= WINDOW) return false;
  if (state.query >= from && state.query < from + WINDOW) return false;
  site.store.set({ from: windowStart(n, state.query - WINDOW / 2) });
  return true;
}

/** The active cell in words; without an active key, what the row looks at most. */
function attentionRead(site, { sheet, cursor, labels, keyLabels, moved, name }) {
  if (cursor.query < 0 && cursor.key < 0) return "The active token is not drawn.";
  if (cursor.query < 0) return `${quoted(keyLabels[cursor.key])} is looked at most by ${strongestWords(sheet.column("raw", cursor.key), labels) || "nothing"}.`;
  const [query, key] = [labels[cursor.query], keyLabels[cursor.key]];
  if (cursor.key >= 0) {
    if (Number.isNaN(sheet.at("raw", cursor.query, cursor.key))) return sheet.head.isDifference ? `${query} → ${key} is left out.` : `${query} does not see ${key} in ${name}.`;
    const parts = sheet.maps.map((map) => `${map} ${number(sheet.at(map, cursor.query, cursor.key))}`);
    const change = moved?.at === cursor.query ? `; moved to ${number(moved.row[cursor.key])}` : "";
    return `${query} → ${key} in ${name}: ${parts.join(", ")}${change}.`;
  }
  const row = sheet.row("raw", cursor.query, moved?.at === cursor.query ? site.store.get().moved : null);
  if (!sheet.head.isDifference) return `${quoted(query)} looks most at ${strongestWords(row, keyLabels) || "nothing"} in ${name}.`;
  if (row.every(Number.isNaN)) return `The row of ${quoted(query)} is left out.`;
  const [first, second] = [row, row.map((weight) => -weight)].map((more) => strongestWords(more, keyLabels));
  const said = [first && `more at ${first} in the first result`, second && `more at ${second} in the second`].filter(Boolean);
  return `In ${name}, ${quoted(query)} looks ${said.join(", and ") || "the same way in both results"}.`;
}

function strongestWords(weights, labels) {
  const places = Array.from(weights.keys()).filter((at) => weights[at] > 0).sort((a, b) => weights[b] - weights[a]);
  return places.slice(0, 3).map((at) => `${quoted(labels[at])} (${number(weights[at])})`).join(", ");
}

/** What the reader must know to read the figure: the certificate, and everything that was left out or gathered. */
function attentionNotes(site, state, { sheet, shown, moved, what }) {
  const { about } = site.view;
  const told = [];
  const place = state.layer * about.attention.head_numbers.length + state.head;
  const residual = site.view.array("heads.residual")?.data[place];
  const measure = headMeasure(site, state);
  if (measure) told.push(`${measure.meaning} ${measureEnds(measure.exact && !shown.byWord)}`);
  else if (residual >= 0) {
    told.push(`Effective attention reproduces this head's output to within ${tiny(residual)} (relative).`);
  }
  told.push(
    state.shape === "lines"
      ? `About ${LINES_DRAWN} of the strongest lines are drawn, and all of the active token.`
      : `Below each map: what each key receives on average.${site.rows.certainty || site.rows.rows.size ? " Left: the determined share of each row." : ""}`,
  );
  const texts = [about, about.keys ?? about];
  const left = !state.special && texts.some((text) => text.tokens.some((_, at) => isSpecial(about, at, text)));
  const long = shown.n > WINDOW || shown.keys.n > WINDOW;
  const special = about.attention.special_group === "first token" ? "The first token is" : "Special tokens are";
  if (left) told.push(`${special} left out of the drawing and of the scale.`);
  const windows = about.keys ? [[shown, "Target tokens"], [shown.keys, "Source tokens"]] : [[shown, "Tokens"]];
  for (const [part, what] of windows) {
    if (part.n > WINDOW) told.push(`${what} ${part.from} to ${part.to - 1} of ${part.n} are drawn.`);
  }
  if ((left || long) && sheet.done && !sheet.head.isDifference) {
    told.push(`On average, ${(sheet.outside / sheet.done).toFixed(2)} of a row's raw ${what} goes to keys that are not drawn.`);
  }
  if (about.measures_left_out) told.push(about.measures_left_out);
  if (shown.byWord || shown.keys.byWord) told.push("Words: what pieces receive is added up, what they do is averaged.");
  if (moved) told.push(`The row of ${shown.labels[moved.at]} was moved in the edge view; the marked row of raw shows it.`);
  return told;
}

function attentionPointer(site, canvas, sheetNow) {
  const under = (...at) => {
    const { width, height } = canvas.getBoundingClientRect();
    const [sheet, lines] = [sheetNow(), site.store.get().shape === "lines"];
    const spot = lines ? linesAt(width, height, sheet, ...at) : matrixAt(matrixLayout(width, sheet), sheet, ...at);
    const position = ({ groups }, at) => (at >= 0 ? groups[at][0] : -1);
    return spot && { query: position(sheet.shown, spot.query), key: position(sheet.shown.keys, spot.key) };
  };
  const hover = (found) => {
    const { hoverQuery, hoverKey } = site.store.get();
    const [query, key] = found ? [found.query, found.key] : [-1, -1];
    if (hoverQuery !== query || hoverKey !== key) site.store.set({ hoverQuery: query, hoverKey: key });
  };
  const choose = ({ query, key }) => site.store.set({ ...(query >= 0 && { query }), ...(key >= 0 && { key }) });
  pointable(canvas, { under, hover, choose, press: (event) => attentionPress(site, sheetNow().shown, event), cursor: "" });
}

/** Up and down move the query, left and right the key; Enter follows the edge to its key, Escape lets the key go. */
function attentionPress(site, shown, event) {
  const state = site.store.get();
  const step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const name = event.key === "ArrowUp" || event.key === "ArrowDown" ? "query" : "key";
  const { groups, place, n, from } = name === "key" ? shown.keys : shown;
  const follows = shown.keys === shown; // else its key is no query
  if (step) {
    const at = place[state[name]] ?? -1;
    const first = follows ? Math.max(0, place[state.query]) : 0;
    const next = groups[name === "key" && state.key < 0 ? first : at + step];
    if (next) site.store.set({ [name]: next[0] });
    else if (at >= 0) attentionTurn(site, name, n, from, step);
  } else if ((event.key === "Enter" || event.key === " ") && state.key >= 0 && follows) {
    site.store.set({ query: state.key, key: -1 });
  } else if (event.key === "Escape") site.store.set({ key: -1, hoverQuery: -1, hoverKey: -1 });
  else return;
  event.preventDefault();
}

/** Move the window of a long text by half, and the query or key to its new token there. */
function attentionTurn(site, name, n, from, step) {
  const next = step > 0 ? from + WINDOW : from - 1;
  if (next < 0 || next >= n) return;
  site.store.set({ from: windowStart(n, from + (step * WINDOW) / 2), [name]: next });
}
