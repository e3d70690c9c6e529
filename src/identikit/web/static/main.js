// The page: panels around the views, one state for all of them, themes, links, exports and the tour.

import { decode, tokenNames } from "./data.js";
import { headsOf } from "./head.js";
import { measuresOf } from "./measures.js";
import { RowBook } from "./rows.js";
import { CHOICES, address, createStore, parse } from "./state.js";
import { THEMES, setTheme } from "./colour.js";
import { VerdictView } from "./verdict.js";
import { HeadsView } from "./heads.js";
import { AttentionView } from "./attention.js";
import { EdgeView } from "./edge.js";
import { PictureView } from "./picture.js";
import { TokensView } from "./tokens.js";
import { ProvenanceView } from "./provenance.js";
import { numbersView } from "./numbers.js";
import { exportMenu, copied } from "./export.js";
import { tour } from "./tour.js";
import { button, element, onceAFrame } from "./parts.js";

const TOLD = 5000; // milliseconds that a message stays

/** Show a file in `root`. `source` computes what the file lacks; `linked`: the page's address holds the state; `suffix` of ids; `title`: its heading. */
export function mount(root, buffer, { source = { live: false }, linked = false, start = null, suffix = "", title = "identikit" } = {}) {
  const view = decode(buffer);
  const store = createStore(linked ? location.hash : "", view.about.first ?? {});
  store.set(within(view, store.get()));
  const site = makeSite(root, view, store, source);
  site.suffix = suffix;
  const page = layout(root, site, { linked, start, title });
  const views = makeViews(site, page);
  let before = null;
  const draw = () => {
    const state = store.get();
    setTheme(root, site.theme());
    root.classList.toggle("embedded", state.embed);
    for (const panel of views) refresh(panel, state, before);
    before = state;
    const text = address(state, view.about.first);
    if (linked && location.hash.replace(/^#/, "") !== text) history.replaceState(null, "", `#${text}`);
  };
  const ask = onceAFrame(draw);
  site.redraw = ask;
  store.subscribe(ask);
  const observer = new ResizeObserver(ask);
  observer.observe(root);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", ask);
  const follow = () => store.set(within(view, { ...CHOICES, ...view.about.first, ...parse(location.hash) }));
  if (linked) addEventListener("hashchange", follow);
  draw();
  root.identikit = { site, store, views: Object.fromEntries(views.map((panel) => [panel.view.id, panel.view])) };
  return () => {
    observer.disconnect();
    dark.removeEventListener("change", ask);
    removeEventListener("hashchange", follow);
    root.replaceChildren();
  };
}

/** A state whose places exist in the file. */
function within(view, state) {
  const { tokens, keys, attention } = view.about;
  const inside = (value, count) => Math.min(Math.max(0, Math.trunc(value)), Math.max(0, count - 1));
  const known = (name, ...values) => (values.includes(state[name]) ? state[name] : CHOICES[name]);
  return {
    ...state,
    layer: inside(state.layer, attention?.layer_numbers.length ?? 1),
    head: inside(state.head, attention?.head_numbers.length ?? 1),
    query: inside(state.query, tokens.length),
    key: state.key < 0 ? -1 : inside(state.key, (keys ?? view.about).tokens.length),
    from: inside(state.from, Math.max(tokens.length, (keys ?? view.about).tokens.length)),
    epsilon: inside(state.epsilon, 1 + (view.about.rows?.epsilons.length ?? 0)),
    threshold: Math.min(1, Math.max(0, state.threshold)),
    tab: known("tab", "tokens", "provenance", "numbers"),
    heads: known("heads", "scatter", "grid"),
    shape: known("shape", "matrix", "lines"),
    overlay: known("overlay", "lower", "upper", "effective", "none"),
    sort: known("sort", "weight", "width", "text"),
    theme: known("theme", "light", "dark", ""),
  };
}

const namesOf = ({ tokens }) => tokenNames(tokens.map((token) => token.trim() || token));

function makeSite(root, view, store, source) {
  const site = {
    view,
    store,
    source: null,
    heads: headsOf(view),
    measures: measuresOf(view),
    rows: new RowBook(view),
    names: namesOf(view.about),
    keyNames: namesOf(view.about.keys ?? view.about),
    theme: () => store.get().theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"),
    colours: () => THEMES[site.theme()],
    redraw: () => {},
    /** Say something to screen readers. */
    announce: (words) => {
      site.live.classList.remove("told");
      site.live.textContent = words;
    },
    /** Say something to everyone: it is shown for a while. */
    tell: (words) => {
      site.announce(words);
      site.live.classList.add("told");
      clearTimeout(site.telling);
      site.telling = setTimeout(() => site.live.classList.remove("told"), TOLD);
    },
    telling: 0,
    live: element("p", { class: "live", "aria-live": "polite" }),
    busy: new Map(),
    failed: new Map(),
    /** Show what a panel waits for, then the outcome. */
    task(id, promise, words) {
      site.busy.set(id, words);
      site.failed.delete(id);
      site.redraw();
      return promise
        .catch((error) => site.failed.set(id, error.message))
        .finally(() => {
          site.busy.delete(id);
          site.redraw();
        });
    },
  };
  site.source = source.live ? source.of(site) : source;
  return site;
}

function layout(root, site, { linked, start, title }) {
  const { about } = site.view;
  const count = about.tokens.length;
  const theme = button("Theme", "Change between light and dark", () =>
    site.store.set({ theme: site.theme() === "dark" ? "light" : "dark" }),
  );
  const link = button("Copy link", "Copy a link to this view", async () => {
    const done = await copied(location.href.split("#")[0] + `#${address(site.store.get(), about.first)}`);
    site.tell(done ? "The link was copied." : "The link could not be copied. It is in the address bar.");
  });
  const tools = element("div", { class: "tools" }, theme, ...(linked ? [link] : []));
  const heading = element(
    "div",
    { class: "title" },
    element("h1", {}, title),
    element("span", {}, about.model),
    element("span", {}, `${count} token${count === 1 ? "" : "s"}${about.keys ? ` that look at ${about.keys.tokens.length} of a source` : ""}`),
  );
  const top = element("header", { class: "top" }, heading, tools);
  const places = {};
  for (const name of ["verdict", ...(about.images ? ["picture"] : []), "heads", "attention", "edge", "bottom"]) {
    places[name] = element("div", { class: `place ${name}` });
    places[name].style.gridArea = name;
  }
  const main = element("main", { class: `panels${about.images ? " pictured" : ""}` }, ...Object.values(places));
  root.classList.add("identikit");
  root.replaceChildren(top, ...(start ? [start] : []), element("div", { class: "frame" }, main), site.live);
  return { places, tools, main };
}

const TABS = ["tokens", "provenance", "numbers"];

function makeViews(site, page) {
  const kinds = { verdict: VerdictView, picture: PictureView, heads: HeadsView, attention: AttentionView, edge: EdgeView };
  const panels = Object.entries(kinds).filter(([name]) => page.places[name]).map(([name, View]) => panelOf(site, new View(site), page.places[name]));
  const tabs = element("div", { role: "tablist", class: "tabs", "aria-label": "More views" });
  page.places.bottom.append(tabs);
  const lower = [new TokensView(site), new ProvenanceView(site)];
  const numbers = numbersView(site, [...panels, ...lower.map((view) => ({ view }))]);
  const below = [...lower, numbers].map((view) => {
    const panel = panelOf(site, view, page.places.bottom);
    panel.tab = element("button", { type: "button", role: "tab", id: `tab-${view.id}${site.suffix}`, "aria-controls": `panel-${view.id}${site.suffix}` }, view.title);
    panel.tab.addEventListener("click", () => site.store.set({ tab: view.id }));
    panel.section.setAttribute("role", "tabpanel");
    tabs.append(panel.tab);
    return panel;
  });
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(TABS.indexOf(site.store.get().tab) + step + TABS.length) % TABS.length];
    site.store.set({ tab: next });
    below[TABS.indexOf(next)].tab.focus();
  });
  panels.push(...below);
  page.tools.append(exportMenu(site, panels), tour(site, page.main));
  return panels;
}

/** A view in a panel of its own, with its title and help, and a note of what it lacks. */
export function panelOf(site, view, place) {
  const heading = element("h2", { id: `title-${view.id}${site.suffix}` }, view.title);
  const help = element("p", { class: "help" }, view.help);
  const note = element("p", { class: "note", hidden: true });
  const body = element("div", { class: "body" }, view.element);
  const section = element("section", { class: "panel", id: `panel-${view.id}${site.suffix}`, "aria-labelledby": heading.id }, heading, help, note, body);
  place.append(section);
  return { view, section, note, body, site, tab: null };
}

/** Bring a panel up to date: its loading, failed or empty state, or the view itself. */
export function refresh({ view, section, note, body, tab, site }, state, before) {
  const shown = !tab || state.tab === view.id;
  section.hidden = !shown;
  tab?.setAttribute("aria-selected", String(shown));
  tab?.setAttribute("tabindex", shown ? "0" : "-1");
  if (!shown) return;
  const why = view.unavailable();
  const [busy, failed] = [site.busy.get(view.id), site.failed.get(view.id)];
  note.hidden = !(busy || failed || why);
  note.className = `note ${busy ? "loading" : failed ? "failed" : "empty"}`;
  note.textContent = busy ?? failed ?? why ?? "";
  body.hidden = Boolean(why);
  if (!why) view.update(state, before);
}
