"use strict";
// Draws the figures of the page: each is data in the script after its place.
const root = document.documentElement;
const touched = matchMedia("(pointer: coarse)").matches;
const config = {displayModeBar: false, responsive: true, displaylogo: false};

/** Returns a copy of `value` with variables of the style sheet replaced by their colours. */
function coloured(value, style) {
  if (typeof value === "string")
    return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  if (Array.isArray(value)) return value.map(part => coloured(part, style));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, coloured(part, style)]));
  return value;
}

const figures = [...document.querySelectorAll(".plot")].map(place => ({
  place, content: JSON.parse(place.nextElementSibling.textContent)}));

function draw(width) {
  const style = getComputedStyle(root);
  for (const {place, content} of figures) {
    const {data, layout} = coloured(content, style);
    // A finger scrolls the page; a tap tells what is there.
    if (touched) layout.dragmode = false;
    if (width) layout.width = width;
    place.querySelector("noscript")?.remove();
    Plotly.react(place, data, layout, config);
  }
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

// Figures of one kind are zoomed together: the planned and the measured iteration.
let following = false;
for (const {place} of figures) {
  const kind = place.parentElement.className;
  const others = figures.filter(f => f.place !== place && f.place.parentElement.className === kind);
  if (kind === "chart" || !others.length) continue;
  place.on("plotly_relayout", change => {
    if (following) return;
    following = true;
    const moved = Object.fromEntries(Object.entries(change).filter(([key]) => key.startsWith("xaxis")));
    if (Object.keys(moved).length)
      Promise.all(others.map(f => Plotly.relayout(f.place, moved))).finally(() => { following = false; });
    else following = false;
  });
}

// Paper has a width of its own, and is light.
addEventListener("beforeprint", () => {
  root.classList.add("paper");
  draw(Math.min(...figures.map(f => f.place.clientWidth), 640));
});
addEventListener("afterprint", () => {
  root.classList.remove("paper");
  draw();
});
