// The console's own script: theme, keys, charts, the playground, and what is said when the server does not answer.
"use strict";

const root = document.body.dataset.root;
const byId = (id) => document.getElementById(id);

// -- theme: a cookie, so that the next page comes in it from the start

const dark = () => {
  const said = document.documentElement.dataset.theme;
  return said ? said === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const themed = [];

function setTheme() {
  const button = byId("theme");
  button.hidden = false;
  button.textContent = dark() ? "Light" : "Dark";
  button.setAttribute("aria-label", `Use the ${dark() ? "light" : "dark"} theme`);
  themed.forEach((draw) => draw());
}

byId("theme").addEventListener("click", () => {
  const theme = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  document.cookie = `mint_theme=${theme}; path=${root}/console; max-age=31536000; samesite=strict`;
  setTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
setTheme();

// -- keys

const keys = byId("keys");
byId("keys-button").hidden = false;
byId("keys-button").addEventListener("click", () => keys.showModal());
let went = 0; // when g was pressed

document.addEventListener("keydown", (event) => {
  const writing = event.target.closest("input, textarea, select, dialog");
  if (writing || event.ctrlKey || event.metaKey || event.altKey) return;
  const link = performance.now() - went < 1500 && document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  went = event.key === "g" ? performance.now() : 0;
  const search = event.key === "/" && document.querySelector('[aria-keyshortcuts="/"]');
  if (link) link.click();
  else if (event.key === "/" && search) search.select();
  else if (event.key === "/") location.href = `${root}/console/policies#match`;
  else if (event.key === "?") keys.showModal();
  else return;
  event.preventDefault();
});
if (location.hash === "#match") byId("match")?.focus();

// -- what is looked at again and again

const pause = byId("pause");
let paused = false;
if (pause) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", paused);
    pause.textContent = paused ? "Go on" : "Pause";
  });
  byId("live").addEventListener("htmx:beforeRequest", (event) => {
    if (paused || document.hidden) event.preventDefault();
  });
}
const trouble = (there) => () => {
  byId("trouble").hidden = !there;
};
for (const name of ["htmx:sendError", "htmx:responseError"]) document.addEventListener(name, trouble(true));
document.addEventListener("htmx:afterOnLoad", trouble(false));

// -- curves

function chart(place, curve) {
  const colour = (name) => getComputedStyle(place)[name];
  const probe = document.createElement("a"); // has the accent's colour
  place.append(probe);
  const axis = { stroke: () => colour("color"), grid: { stroke: () => colour("borderTopColor"), width: 1 }, ticks: { show: false } };
  const options = {
    width: place.clientWidth,
    height: 220,
    hooks: { ready: [(plot) => plot.setLegend({ idx: curve.x.length - 1 })] },
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 30, incrs: [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((e) => n * 10 ** e)).sort((a, b) => a - b) }, { ...axis, size: 64 }],
    series: [
      { label: curve.of },
      { label: place.dataset.curve, width: 2, spanGaps: false, points: { show: curve.x.length < 40, size: 5 },
        stroke: () => getComputedStyle(probe).color, value: (_, y) => (y === null ? "none" : y.toPrecision(5)) },
    ],
  };
  const plot = new uPlot(options, [curve.x, curve.y], place);
  themed.push(() => plot.redraw(false));
  new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: 220 })).observe(place);
}

for (const place of document.querySelectorAll("[data-points]")) chart(place, JSON.parse(place.dataset.points));

// -- playground

const form = byId("playground");
let stopping = null;

function request(side) {
  const chat = form.elements.chat?.checked;
  const prompt = form.elements.prompt.value;
  const body = {
    model: form.elements[side].value.trim(),
    max_tokens: Number(form.elements.max_tokens.value),
    temperature: Number(form.elements.temperature.value),
    seed: Number(form.elements.seed.value),
    stream: true,
    stream_options: { include_usage: true },
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const headers = { "content-type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal: stopping.signal };
  return fetch(`${root}/console/playground/${chat ? "chat" : "completions"}`, options);
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

async function refusal(answer) {
  const text = await answer.text();
  try {
    const told = JSON.parse(text);
    return told.error?.message ?? told.detail ?? text;
  } catch {
    return text || `the server answered ${answer.status}`;
  }
}

async function sample(side) {
  const place = document.querySelector(`[data-side="${side}"]`);
  const [title, told, out] = [place.querySelector("h2"), place.querySelector(".told"), place.querySelector(".answer")];
  const name = form.elements[side].value.trim();
  title.textContent = name || (side === "a" ? "Left" : "Right");
  told.textContent = "\u00a0";
  out.textContent = "";
  out.classList.remove("failed");
  if (!name) return "";
  const began = performance.now();
  const fail = (why) => {
    out.textContent = why;
    out.classList.add("failed");
    return "";
  };
  let text = "", first = 0, revision = "base", why = "", tokens = "";
  try {
    const answer = await request(side);
    if (!answer.ok) return fail(await refusal(answer));
    for await (const chunk of events(answer)) {
      if (chunk.error) return fail(chunk.error.message);
      const choice = chunk.choices[0];
      const more = choice?.text ?? choice?.delta?.content ?? "";
      if (more && !first) first = performance.now() - began;
      text += more;
      if (choice?.finish_reason) why = choice.finish_reason;
      if (chunk.usage) tokens = `${chunk.usage.completion_tokens} tokens, `;
      if (chunk.mint_revision) revision = chunk.mint_revision.slice(0, 12);
      out.textContent = text;
    }
  } catch (error) {
    if (error.name !== "AbortError") return fail(String(error));
    why = "stopped";
  }
  const took = performance.now() - began;
  told.textContent = `revision ${revision}; ${tokens}${why}; first text after ${first.toFixed(0)} ms, all after ${took.toFixed(0)} ms`;
  return text;
}

function compare(texts) {
  const said = byId("differs");
  said.textContent = "";
  if (!texts[0] || !texts[1]) return;
  const marks = texts.map((text) => Array.from(text));
  let at = 0;
  while (at < marks[0].length && marks[0][at] === marks[1][at]) at += 1;
  if (at === marks[0].length && at === marks[1].length) return void (said.textContent = "Both answers are alike.");
  said.textContent = `The answers differ from character ${at + 1} on.`;
  ["a", "b"].forEach((side, i) => {
    const other = document.createElement("span");
    other.className = "other";
    other.textContent = marks[i].slice(at).join("");
    document.querySelector(`[data-side="${side}"] .answer`).replaceChildren(marks[i].slice(0, at).join(""), other);
  });
}

async function run() {
  const button = form.querySelector("button");
  stopping = new AbortController();
  byId("differs").textContent = "Sampling.";
  button.disabled = true;
  byId("stop").disabled = false;
  try {
    const texts = await Promise.all(["a", "b"].map(sample));
    byId("differs").textContent = "";
    compare(texts);
  } finally {
    button.disabled = false;
    byId("stop").disabled = true;
  }
}

if (form) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.ctrlKey && !form.querySelector("button").disabled) form.requestSubmit();
  });
}
