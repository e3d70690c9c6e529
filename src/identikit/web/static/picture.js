// The image of a text with one row of attention on its patches: raw, the ends of its intervals, or effective.
import { css, diverging } from "./colour.js";
import { activeKey, activeQuery, choice, drawFigure, figureCanvas, figureWidth, headCode, headName, intervalsCode, pointable, quoted, say, tickBox } from "./figure.js";
import { element, number, percent } from "./parts.js";
import { activeRow } from "./rows.js";

const PICTURE_TALLEST = 420;
const PICTURE_LEGEND = 38;
const PICTURE_GAP = 12;
const PICTURE_FADED = 0.6; // how much of the picture's own light and dark is left below the patches
const PICTURE_OPACITY = [0.3, 0.8]; // of a patch without weight, and of the heaviest
const PICTURE_MAPS = [["raw", "Raw"], ["lower", "At least"], ["upper", "At most"], ["effective", "Effective"], ["none", "Picture"]];
const PICTURE_NAMED = 3; // tokens outside of the image that are named

export class PictureView {
  constructor(site) {
    this.site = site;
    this.id = "picture";
    this.title = "Picture";
    this.help = "What one token looks at in the image. Point at a patch to find it in the other views; click to keep it, and press Enter to read its own row.";
    this.images = imagesOf(site);
    this.patches = this.images.flatMap(({ patches }) => patches);
    this.of = new Map(this.patches.map((patch) => [patch.position, patch]));
    this.canvas = figureCanvas();
    this.maps = choice("On the image", PICTURE_MAPS, (overlay) => site.store.set({ overlay }));
    this.overview = tickBox("Overview", (overview) => site.store.set({ overview }));
    this.overview.element.title = "The whole picture made smaller, which the model reads beside its tiles.";
    this.overview.element.hidden = !this.patches.some(({ overview }) => overview);
    this.says = element("p", { class: "figure-says" });
    this.readout = element("p", { class: "figure-readout" });
    this.note = element("p", { class: "figure-note" });
    const controls = element("div", { class: "maps-controls" }, this.maps.element, this.overview.element);
    const holder = element("div", { class: "figure-holder" }, this.canvas);
    this.element = element("div", {}, controls, holder, this.says, this.readout, this.note);
    this.listen();
  }

  unavailable() {
    return null;
  }

  /** What is drawn: the row, the weights of the chosen map (null: not known), and the patches that stand on the images. */
  look(state) {
    const row = activeRow(this.site, state);
    const some = this.patches.filter(({ overview }) => !overview);
    const patches = state.overview || !some.length ? this.patches.filter(({ overview }) => overview) : some;
    const seen = new Set(row.keys);
    const known = ["raw", "lower", "upper", "effective"].filter((name) => row[name]);
    const sizes = known.flatMap((name) => patches.map(({ position }) => (seen.has(position) ? Math.abs(row[name][position]) : 0)));
    const most = sizes.reduce((one, other) => Math.max(one, other), 1e-3);
    return { row, patches, seen, weights: row[state.overlay] ?? null, most, sinks: this.sinks(row, patches) };
  }

  /** The patches that take a large share of their image's raw attention. */
  sinks({ raw }, patches) {
    if (!raw) return [];
    const totals = this.images.map(({ patches: all }) => all.reduce((sum, { position }) => sum + raw[position], 0));
    return patches.filter(({ position, image }) => raw[position] > this.site.view.about.sink * totals[image]);
  }

  /** Where the images stand: below one another, or two by two. */
  places(width) {
    const columns = this.images.length > 1 && width >= 520 ? 2 : 1;
    const widest = (width - PICTURE_GAP * (columns - 1)) / columns;
    let [top, tallest] = [1, 0];
    const boxes = this.images.map(({ width: wide, height }, at) => {
      if (at % columns === 0 && at) [top, tallest] = [top + tallest + PICTURE_GAP, 0];
      const scale = Math.min((widest - 2) / wide, PICTURE_TALLEST / height);
      tallest = Math.max(tallest, Math.round(scale * height));
      return { x: 1 + (at % columns) * (widest + PICTURE_GAP), y: top, scale, width: Math.round(scale * wide), height: Math.round(scale * height) };
    });
    return { boxes, bottom: top + tallest };
  }

  size() {
    const width = figureWidth(this.canvas);
    return [width, this.places(width).bottom + PICTURE_LEGEND];
  }

  paint(pen, state) {
    const colours = this.site.colours();
    const { boxes, bottom } = this.places(pen.width);
    const look = this.look(state);
    this.images.forEach((image, at) => {
      const { x, y, width, height } = boxes[at];
      const pixels = image.pixels?.(state.overlay === "none" ? null : colours);
      if (pixels) pen.cells(x, y, width, height, image.across, image.down, pixels, true);
      else pen.rect(x, y, width, height, colours.wash);
    });
    const tint = diverging(colours, look.most);
    for (const patch of look.weights ? look.patches : []) {
      if (!look.seen.has(patch.position)) continue;
      const { x, y, width, height } = patchBox(patch, boxes);
      const weight = look.weights[patch.position];
      const share = Math.sqrt(Math.min(1, Math.abs(weight) / look.most)); // as the scale of colours
      const [least, most] = PICTURE_OPACITY;
      pen.rect(x, y, width, height, css(tint(weight)), { opacity: least + (most - least) * share });
    }
    if (state.overlay !== "none") for (const patch of look.sinks) pictureCross(pen, patchBox(patch, boxes), colours);
    this.paintMarks(pen, state, boxes, colours);
    if (look.weights) pictureLegend(pen, bottom, look, tint, colours);
  }

  /** Frames: of the key that is looked at, and, where it is a patch itself, of the token that looks. */
  paintMarks(pen, state, boxes, colours) {
    for (const [position, stroke] of [[activeQuery(state), colours.ink], [activeKey(state), colours.focus]]) {
      const patch = this.of.get(position);
      if (!patch) continue;
      const { x, y, width, height } = patchBox(patch, boxes);
      pen.rect(x, y, width, height, null, { stroke: colours.paper, line: 5 });
      pen.rect(x, y, width, height, null, { stroke, line: 2.5 });
    }
  }

  update(state) {
    drawFigure(this.canvas, this, state);
    const look = this.look(state);
    this.maps.press(state.overlay);
    this.overview.box.checked = state.overview;
    say(this.says, this.sentence(state, look));
    say(this.readout, this.numbers(state, look) || this.elsewhere(look));
    say(this.note, this.notes(state, look));
  }

  /** What the token gives to the images, and how much of that its output determines. */
  sentence(state, { row }) {
    const name = `${headName(this.site.view, state)}, ${quoted(this.site.names[row.query])}`;
    if (!row.raw) return `${name}: this row was not computed.`;
    const totals = state.epsilon ? [] : (row.found?.images ?? []);
    const each = totals.length === this.images.length; // else all of them together
    if (totals.length) return totals.map((total, at) => `${at ? "It" : name} gives ${this.totalWords(total, each ? at : -1)}`).join(" ");
    const raw = this.patches.reduce((sum, { position }) => sum + row.raw[position], 0);
    const fixed = row.widest < 1e-6 ? ", all of it determined by the output" : "";
    return `${name} gives ${this.imageName(-1)} ${percent(raw)} of its attention${fixed}.`;
  }

  totalWords({ raw, lower, upper, alone }, image) {
    const whole = `${this.imageName(image)} ${percent(raw)} of its attention`;
    if (upper - lower < 1e-6 && raw - alone < 1e-6) return `${whole}, all of it determined by the output.`;
    const share = raw > 0 ? ` Patch by patch, ${percent(Math.min(1, alone / raw))} of that is determined by the output.` : "";
    return `${whole}, and between ${percent(lower)} and ${percent(upper)} in every alternative.${share}`;
  }

  imageName(image) {
    if (this.images.length === 1) return "the image";
    return image < 0 ? "the images" : `image ${image}`;
  }

  /** The numbers of the active patch. */
  numbers(state, { row, seen }) {
    const key = activeKey(state);
    if (!this.of.has(key) || !row.raw) return "";
    const name = quoted(this.site.names[key]);
    if (!seen.has(key)) return `${quoted(this.site.names[row.query])} does not see ${name}.`;
    const range = row.lower ? `, between ${number(row.lower[key])} and ${number(row.upper[key])}` : "";
    const effective = row.effective ? `, effective ${number(row.effective[key])}` : "";
    return `${name}: raw ${number(row.raw[key])}${range}${effective}.`;
  }

  /** What the token looks at most outside of the image. */
  elsewhere({ row }) {
    if (!row.raw) return "";
    const outside = row.keys.filter((key) => !this.of.has(key)).toSorted((one, other) => row.raw[other] - row.raw[one]);
    const named = outside.slice(0, PICTURE_NAMED).map((key) => `${quoted(this.site.names[key])} (${number(row.raw[key])})`);
    return named.length ? `Outside of the image it looks most at ${named.join(", ")}.` : "";
  }

  notes(state, { row, weights, sinks }) {
    const told = [];
    if (state.overlay !== "none" && !weights && row.raw) {
      const ends = state.overlay === "lower" || state.overlay === "upper";
      told.push(ends ? "This file has no intervals for this row." : "This file does not hold the map.");
    }
    if (state.overlay !== "none" && sinks.length) {
      const many = sinks.length > 1;
      told.push(`${many ? "Crosses mark patches that take" : "The cross marks a patch that takes"} more than ${percent(this.site.view.about.sink)} of the image's raw attention${many ? " each" : ""}.`);
    }
    return told.join(" ");
  }

  listen() {
    const { canvas, site } = this;
    const under = (x, y) => {
      const { boxes } = this.places(figureWidth(canvas));
      const inside = (box) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
      return this.look(site.store.get()).patches.find((patch) => inside(patchBox(patch, boxes))) ?? null;
    };
    const hover = (patch) => {
      if ((patch?.position ?? -1) !== site.store.get().hoverKey) site.store.set({ hoverKey: patch?.position ?? -1 });
    };
    pointable(canvas, { under, hover, choose: ({ position }) => site.store.set({ key: position }), press: (event) => this.press(event) });
  }

  /** Arrows go to the next patch, Enter reads the row of the patch, Escape lets it go. */
  press(event) {
    const { store } = this.site;
    const { key } = store.get();
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way) {
      const { patches } = this.look(store.get());
      const next = patches.includes(this.of.get(key)) ? nextPatch(patches, this.of.get(key), way) : patches[0];
      store.set({ key: next.position, hoverKey: -1 });
    } else if (event.key === "Enter" && this.of.has(key)) store.set({ query: key, key: -1 });
    else if (event.key === "Escape") store.set({ key: -1, hoverKey: -1 });
    else return;
    event.preventDefault();
  }

  table(state) {
    const { row, patches } = this.look(state);
    const parts = ["raw", "lower", "upper", "effective"].filter((name) => row[name]);
    const rows = patches.map(({ image, position, box }) => [image, position, this.site.names[position], ...box, ...parts.map((name) => row[name][position])]);
    return { columns: ["image", "position", "token", "left", "top", "right", "bottom", ...parts], rows };
  }

  python(state) {
    const { view } = this.site;
    return [`row = ${intervalsCode(view, `${headCode(view, state)}, query=${activeQuery(state)}`)}`, "print(row)", 'row.plot("image")'].join("\n");
  }

  describe(state) {
    const look = this.look(state);
    return [this.sentence(state, look), this.numbers(state, look), this.elsewhere(look)].filter(Boolean).join(" ");
  }
}

/** The images of a file with their patches; the pixels come when the browser has read them. */
function imagesOf(site) {
  const { view } = site;
  return view.about.images.map((about, at) => {
    const [jpeg, position, box, overview] = ["jpeg", "position", "box", "overview"].map((name) => view.array(`image${at}.${name}`).data);
    const patches = Array.from(position, (place, patch) => ({ image: at, position: place, box: box.subarray(4 * patch, 4 * patch + 4), overview: Boolean(overview[patch]) }));
    const image = { ...about, patches };
    createImageBitmap(new Blob([jpeg], { type: "image/jpeg" })).then((read) => {
      Object.assign(image, { across: read.width, down: read.height, pixels: pixelsOf(read) });
      site.redraw();
    }, () => site.tell("The picture could not be read."));
    return image;
  });
}

/** A function from a theme's colours to the picture without colours, faded into the paper; from null to itself. */
function pixelsOf(read) {
  const canvas = element("canvas", { width: read.width, height: read.height });
  const context = canvas.getContext("2d");
  context.drawImage(read, 0, 0);
  const { data } = context.getImageData(0, 0, read.width, read.height);
  const made = new Map([[null, data]]); // kept: pens know a picture by its colours
  return (colours) => {
    if (!made.has(colours)) {
      const paper = [1, 3, 5].map((at) => parseInt(colours.paper.slice(at, at + 2), 16));
      const faded = data.slice();
      for (let at = 0; at < data.length; at += 4) {
        const grey = 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
        for (let part = 0; part < 3; part += 1) faded[at + part] = PICTURE_FADED * grey + (1 - PICTURE_FADED) * paper[part];
      }
      made.set(colours, faded);
    }
    return made.get(colours);
  };
}

/** Where a patch stands in the figure, in whole pixels, so that neighbours neither overlap nor leave a gap. */
function patchBox({ image, box: [left, top, right, bottom] }, boxes) {
  const { x, y, scale } = boxes[image];
  const [from, to] = [[left, top], [right, bottom]].map(([across, down]) => [Math.round(x + scale * across), Math.round(y + scale * down)]);
  return { x: from[0], y: from[1], width: to[0] - from[0], height: to[1] - from[1] };
}

/** The nearest patch in a direction, or the same where there is none. */
function nextPatch(patches, from, [across, down]) {
  const middle = ({ box: [left, top, right, bottom] }) => [(left + right) / 2, (top + bottom) / 2];
  const [x, y] = middle(from);
  let [best, least] = [from, Infinity];
  for (const patch of patches.filter(({ image }) => image === from.image)) {
    const [dx, dy] = [middle(patch)[0] - x, middle(patch)[1] - y];
    const [along, aside] = [dx * across + dy * down, Math.abs(dx * down) + Math.abs(dy * across)];
    if (along > 1e-6 && along + 4 * aside < least) [best, least] = [patch, along + 4 * aside];
  }
  return best;
}

function pictureCross(pen, { x, y, width, height }, colours) {
  const [across, down, half] = [x + width / 2, y + height / 2, Math.min(7, width / 3, height / 3)];
  for (const [stroke, line] of [[colours.paper, 5], [colours.minus, 2.25]]) {
    for (const way of [-1, 1]) pen.line(across - half, down - way * half, across + half, down + way * half, stroke, { width: line });
  }
}

/** The scale of colours, the same for every map of the row. */
function pictureLegend(pen, bottom, { most, weights, patches }, tint, colours) {
  const signed = patches.some(({ position }) => weights[position] < 0);
  const width = Math.min(180, pen.width / 2);
  const y = bottom + 10;
  const steps = 36;
  const least = signed ? -1 : 0;
  for (let at = 0; at < steps; at += 1) {
    const root = least + ((at + 0.5) / steps) * (1 - least);
    pen.rect((at * width) / steps, y, width / steps + 0.5, 8, css(tint(most * root * Math.abs(root))));
  }
  pen.rect(0.5, y, width, 8, null, { stroke: colours.faint });
  const style = { size: 11 };
  pen.text(signed ? number(-most) : "0", 0, y + 20, colours.soft, style);
  pen.text(number(most), width, y + 20, colours.soft, { ...style, align: "right" });
  pen.text("weight", width + 10, y + 4, colours.soft, style);
}
