// The page of a server: a form to type a text, its progress, and the views of the result.

import { setTheme } from "./colour.js";
import { decode } from "./data.js";
import { mount } from "./main.js";
import { button, element } from "./parts.js";

/** Ask the server; what it refuses becomes an error with the server's sentence. */
async function ask(path, { method = "GET", body } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  const binary = answer.headers.get("Content-Type")?.startsWith("application/octet-stream");
  if (answer.ok) return binary ? answer.arrayBuffer() : answer.json();
  const said = await answer.json().catch(() => null);
  const { message, hint } = said?.error ?? { message: `The server answered ${answer.status}.` };
  throw new Error(hint ? `${message} ${hint}` : message);
}

/** What computes for a page what its file does not hold. */
function serverSource(id) {
  const path = `/api/results/${id}`;
  return {
    live: true,
    of(site) {
      const numbers = site.view.about.attention;
      const named = (layer, head) => ({ layer: numbers.layer_numbers[layer], head: numbers.head_numbers[head] });
      return {
        live: true,
        async rows(layer, head, query, epsilon = 0) {
          const at = named(layer, head);
          const body = { rows: [[at.layer, at.head, query]], epsilon: site.rows.epsilons[epsilon] };
          site.rows.add(decode(await ask(`${path}/rows`, { method: "POST", body })));
        },
        async simplex(layer, head) {
          const found = decode(await ask(`${path}/simplex`, { method: "POST", body: named(layer, head) }));
          site.heads(layer, head).simplexMap = found.array("simplex");
        },
        move: ({ layer, head, ...edge }) => ask(`${path}/move`, { method: "POST", body: { ...named(layer, head), ...edge } }),
      };
    },
  };
}

const WELCOME = "Type a text, and press Run. The page then says which attention the output determines, which token each hidden vector still stands for, and where it came from. If your text is a pair, such as a question and an answer, its second half goes into the second box.";
const root = document.getElementById("identikit");
let leave = () => {};

/** Boxes to tick measures that the server names, and what those of a target are of; `asked` is ticked. */
function measureBoxes(facts, asked) {
  const boxes = facts.measures.map(({ name, meaning, of_target }) => ({ box: element("input", { type: "checkbox", value: name, checked: asked.measures.includes(name) }), meaning, of_target }));
  const labels = boxes.map(({ box, meaning }) => element("label", { title: meaning }, box, ` ${box.value}`));
  const target = element("input", { type: "text", value: asked.target ?? "", "aria-label": "Target, optional", placeholder: "Target: a token (what the model predicts)" });
  const ticked = () => boxes.filter(({ box }) => box.checked);
  const changed = () => {
    const full = ticked().length >= facts.limits.measures;
    for (const { box } of boxes) box.disabled = full && !box.checked;
    target.hidden = !ticked().some(({ of_target }) => of_target);
  };
  for (const { box } of boxes) box.addEventListener("change", changed);
  changed();
  const title = element("summary", {}, `Measures (up to ${facts.limits.measures})`);
  return {
    made: element("details", { class: "start-measures", open: ticked().length > 0 }, title, ...labels, target),
    /** What is asked for: nothing where nothing is ticked. */
    asked: () => ({
      ...(ticked().length ? { measures: ticked().map(({ box }) => box.value) } : {}),
      ...(target.hidden || target.value === "" ? {} : { target: /^\d{1,9}$/.test(target.value) ? Number(target.value) : target.value }),
    }),
  };
}

/** The form; `known` is what was asked for before. */
function form(facts, known = null) {
  const text = element("textarea", { rows: "2", "aria-label": "Text", placeholder: "A text to explain" });
  const pair = element("textarea", { rows: "1", "aria-label": "Second text, optional", placeholder: "A second text, if it is a pair" });
  const model = element("select", { "aria-label": "Model" }, ...facts.models.map(({ name }) => element("option", {}, name)));
  const said = element("p", { class: "note", role: "status", hidden: true });
  const bar = element("progress", { max: "1", "aria-label": "Progress", hidden: true });
  const asked = known ?? facts.sample; // whole: a text without a pair has none of the sample's
  [text.value, pair.value] = [asked?.text ?? "", asked?.pair ?? ""];
  if (known) model.value = known.model;
  const measures = measureBoxes(facts, asked);
  const tell = (words, kind = "") => {
    said.hidden = !words;
    said.className = `note ${kind}`;
    said.textContent = words;
  };
  const inputs = () => {
    const ofSample = pair.value !== "" && pair.value === facts.sample.pair && text.value !== facts.sample.text;
    if (ofSample) pair.value = ""; // else a new text would be read as a pair with the sample's second sentence
    const removed = ofSample ? "The sample's second text was removed. Enter a second one if yours is a pair." : "";
    const length = [...text.value, ...pair.value].length;
    const long = length > facts.limits.characters;
    tell(long ? `The text has ${length.toLocaleString("en")} characters, and this server reads at most ${facts.limits.characters.toLocaleString("en")}.` : removed, long ? "failed" : "");
  };
  text.addEventListener("input", inputs);
  pair.addEventListener("input", inputs);
  let running = null;
  const run = button("Run", "Explain this text", async () => {
    run.disabled = true;
    tell("Sending the text…", "loading");
    try {
      const body = { text: text.value, model: model.value, ...(pair.value.trim() ? { pair: pair.value } : {}), ...measures.asked() };
      const job = await ask("/api/jobs", { method: "POST", body });
      running = job.id;
      stop.hidden = bar.hidden = false;
      const end = await watched(job, (now) => {
        tell(words(now), "loading");
        bar.value = now.progress?.total ? now.progress.done / now.progress.total : 0;
      });
      if (end.state === "done") {
        history.pushState(null, "", `/r/${job.id}`);
        await open(facts, job.id);
        return;
      }
      tell(end.error?.message ?? (end.state === "cancelled" ? "The analysis was cancelled." : "The analysis failed."), end.state === "failed" ? "failed" : "");
    } catch (error) {
      tell(error.message, "failed");
    } finally {
      running = null;
      run.disabled = false;
      stop.hidden = bar.hidden = true;
    }
  });
  const stop = button("Cancel", "Stop this analysis", () => running && ask(`/api/jobs/${running}`, { method: "DELETE" }).catch((error) => tell(error.message, "failed")));
  stop.hidden = true;
  const tools = element("div", { class: "start-tools" }, model, run, stop, bar);
  return { made: element("div", { class: "start" }, element("div", { class: "start-texts" }, text, pair), measures.made, tools, said), tell };
}

const words = ({ state, ahead, progress }) =>
  state === "waiting"
    ? `Waiting: ${ahead} ${ahead === 1 ? "analysis is" : "analyses are"} ahead.`
    : `Working: ${progress?.what ?? "reading the text"}${progress?.total ? ` (${progress.done} of ${progress.total})` : ""}.`;

/** Follow a job until it ends; if the stream breaks off, ask again and again. */
function watched(job, told) {
  const ended = (now) => ["done", "failed", "cancelled"].includes(now.state);
  if (ended(job)) return Promise.resolve(job);
  return new Promise((done, failed) => {
    const stream = new EventSource(`/api/jobs/${job.id}/events`);
    stream.addEventListener("state", (event) => {
      const now = JSON.parse(event.data);
      told(now);
      if (ended(now)) {
        stream.close();
        done(now);
      }
    });
    stream.addEventListener("error", async () => {
      stream.close();
      try {
        let now = await ask(`/api/jobs/${job.id}`);
        while (!ended(now)) {
          told(now);
          await new Promise((later) => setTimeout(later, 1000));
          now = await ask(`/api/jobs/${job.id}`);
        }
        done(now);
      } catch (error) {
        failed(error);
      }
    });
  });
}

async function open(facts, id) {
  const known = await ask(`/api/results/${id}`);
  const buffer = await ask(`/api/results/${id}/view`);
  const { made } = form(facts, known);
  leave();
  leave = mount(root, buffer, { source: serverSource(id), linked: true, start: made });
}

async function start() {
  leave();
  leave = () => {};
  root.classList.add("identikit");
  setTheme(root, matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  let page;
  try {
    const facts = await ask("/api");
    page = form(facts);
    const top = element("header", { class: "top" }, element("div", { class: "title" }, element("h1", {}, "identikit"), element("span", {}, "What a transformer's attention and hidden vectors really say")));
    root.replaceChildren(top, element("p", { class: "help" }, WELCOME), page.made);
    const id = location.pathname.match(/^\/r\/([0-9a-f]+)$/)?.[1];
    if (id) {
      page.tell("Loading the result…", "loading");
      await open(facts, id);
    }
  } catch (error) {
    if (page) page.tell(`${error.message} Type a text above to begin.`, "failed");
    else root.replaceChildren(element("p", { class: "note failed" }, error.message));
  }
}

addEventListener("popstate", start);
start();
