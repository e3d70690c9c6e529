// What can be taken away from a view: PNG, SVG, CSV, the Python that gives it; and of all heads, HeadVis' tree of JSON.

import { canvasPen, svgPen } from "./pen.js";
import { callCode } from "./figure.js";
import { element } from "./parts.js";

const KEYS_KEPT = 8; // of each row in HeadVis' tree
const ALL_HEADS = 128; // tokens up to which the tree holds all heads

export function exportMenu(site, panels) {
  const choice = element("select", { "aria-label": "View to export" });
  const visible = panels.filter(({ view }) => view.paint || view.table);
  for (const { view } of visible) choice.append(element("option", { value: view.id }, view.title));
  const chosen = () => visible.find(({ view }) => view.id === choice.value).view;
  const name = (view, kind) => `identikit-${view.id}.${kind}`;
  const acts = {
    PNG: async (view) => save(name(view, "png"), await pngOf(site, view)),
    SVG: async (view) => save(name(view, "svg"), new Blob([svgOf(site, view)], { type: "image/svg+xml" })),
    CSV: async (view) => save(name(view, "csv"), new Blob([csvOf(view.table(site.store.get()))], { type: "text/csv" })),
    Python: async (view) => save(name(view, "py"), new Blob([pythonOf(site, view)], { type: "text/x-python" })),
    "HeadVis JSON": async () => save("identikit-headvis.json", new Blob([JSON.stringify(headVisTree(site))], { type: "application/json" })),
  };
  const list = element("div", { class: "menu-list" }, choice);
  for (const [words, act] of Object.entries(acts)) {
    const one = element("button", { type: "button" }, words);
    one.addEventListener("click", async () => {
      const view = chosen();
      const why = words === "HeadVis JSON" ? null : view.unavailable();
      const lacks = { PNG: !view.paint, SVG: !view.paint }[words];
      if (why || lacks) site.tell(why ?? `${view.title} has no figure. Export it as CSV.`);
      else await act(view).then((file) => site.tell(`${file} was saved.`), (error) => site.tell(`Could not export: ${error.message}`));
    });
    list.append(one);
  }
  const menu = element("details", { class: "menu" }, element("summary", {}, "Export"), list);
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    menu.firstChild.focus();
  });
  const outside = (event) => {
    if (!event.composedPath().includes(menu)) menu.open = false;
  };
  menu.addEventListener("toggle", () => {
    if (menu.open) document.addEventListener("pointerdown", outside);
    else document.removeEventListener("pointerdown", outside);
  });
  return menu;
}

function save(name, blob) {
  const link = element("a", { download: name, href: URL.createObjectURL(blob) });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  return name;
}

export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

function svgOf(site, view) {
  const state = site.store.get();
  const pen = svgPen(...view.size(state), site.colours().paper);
  view.paint(pen, state);
  return pen.finish();
}

function pngOf(site, view) {
  const state = site.store.get();
  const [width, height] = view.size(state);
  const canvas = document.createElement("canvas");
  const pen = canvasPen(canvas, width, height, 2);
  pen.rect(0, 0, width, height, site.colours().paper);
  view.paint(pen, state);
  return new Promise((done) => {
    canvas.toBlob(done, "image/png");
  });
}

function csvOf({ columns, rows }) {
  const cell = (value) => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    const risky = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text; // a spreadsheet would run it
    return /[",\n\r]/.test(risky) ? `"${risky.replaceAll('"', '""')}"` : risky;
  };
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** A value as Python writes it. */
function pythonValue(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) {
    const pair = value.length === 2 && value.every((one) => typeof one === "string");
    return pair ? `(${value.map(pythonValue).join(", ")})` : `[${value.map(pythonValue).join(", ")}]`;
  }
  return JSON.stringify(value);
}

function pythonOf(site, view) {
  const { source, text } = site.view.about;
  const loading = `${source ? pythonValue(source) : ""}${callCode(site.view, "load")}`.replace(/^, /, "");
  const lines = ["import identikit as ik", "", `model = ik.load(${loading})`];
  lines.push(`text = ${text === null ? "...  # the text of this page" : pythonValue(text)}`);
  return `${lines.join("\n")}\n${view.python(site.store.get()).trim()}\n`;
}

/** Files as HeadVis lays them out, by path: the configuration, what the scatter shows, and each head's rows. */
function headVisTree(site) {
  const { about } = site.view;
  if (!about.attention) throw new Error("This page holds no attention.");
  const { layer_numbers: layers, head_numbers: heads, readings = [] } = about.attention;
  const measured = [...readings.map(({ name }) => name), "residual"];
  const state = site.store.get();
  const all = about.tokens.length <= ALL_HEADS;
  const scatter = [];
  const files = {};
  layers.forEach((layer, i) => heads.forEach((head, h) => {
    const metrics = {};
    for (const name of measured) {
      const value = site.view.array(`heads.${name}`)?.data[i * heads.length + h];
      metrics[name] = value === undefined || Number.isNaN(value) ? null : value;
    }
    scatter.push({ layer, head, name: `L${layer}H${head}`, ...metrics });
    if (all || (i === state.layer && h === state.head)) files[`data/heads/L${layer}H${head}.json`] = headVisHead(site, i, h, metrics);
  }));
  const config = { model: about.model, n_layers: layers.length, n_heads: heads.length, layers, heads, tokens: about.tokens };
  return { "data/config.json": config, "data/scatter_data.json": scatter, ...files };
}

function headVisHead(site, layer, head, metrics) {
  const { tokens, keys } = site.view.about;
  const seen = (keys ?? site.view.about).tokens;
  const maps = site.heads(layer, head);
  const rows = tokens.map((token, query) => {
    const raw = maps.row("raw", query);
    const effective = maps.row("effective", query);
    if (!raw) return { query, token, top: [] };
    const order = Array.from(raw.keys()).sort((one, other) => raw[other] - raw[one]).slice(0, KEYS_KEPT);
    return { query, token, top: order.map((key) => ({ key, token: seen[key], raw: raw[key], effective: effective?.[key] ?? null })) };
  });
  return { metrics, sequences: [{ tokens, rows }] };
}
