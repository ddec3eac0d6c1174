// The console's own script: theme, keys, charts, and what is said when the server does not answer.
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
  const writing = event.target.closest("input, select, dialog");
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
