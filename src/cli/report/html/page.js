"use strict";
// The page is complete without this script: it filters, sorts and changes the colours.
const root = document.documentElement;
const table = document.getElementById("workloads");
const body = table.tBodies[0];
const rows = Array.from(body.rows);
const search = document.getElementById("search");
const answer = document.getElementById("answer");
const count = document.getElementById("count");
const headers = Array.from(table.tHead.rows[0].cells);
const texts = rows.map((row) => `${row.textContent} ${row.dataset.images}`.toLowerCase());

// The state is in the address, so that a view can be sent around.
let state = new URLSearchParams();
const remember = () => {
  for (const [key, value] of Array.from(state)) if (!value) state.delete(key);
  history.replaceState(null, "", state.size ? "#" + state : location.pathname + location.search);
};

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, index) => {
    const fits = words.every((word) => texts[index].includes(word))
      && (!answer.value || row.dataset.answers.split(" ").includes(answer.value));
    row.hidden = !fits;
    shown += fits ? 1 : 0;
  });
  count.textContent = `${shown} of ${rows.length}`;
  state.set("q", search.value);
  state.set("show", answer.value);
  remember();
}

function sort(column, descending) {
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const numeric = headers[column].classList.contains("number");
  const compare = numeric ? (a, b) => a - b : (a, b) => a.localeCompare(b);
  const order = rows.map((row, index) => [key(row), index, row]);
  order.sort((a, b) => compare(a[0], b[0]) * (descending ? -1 : 1) || a[1] - b[1]);
  body.append(...order.map((entry) => entry[2]));
  headers.forEach((header, index) => {
    if (index === column) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else header.removeAttribute("aria-sort");
  });
  state.set("sort", (descending ? "-" : "") + column);
  remember();
}

headers.forEach((header, column) => {
  header.querySelector("button")?.addEventListener("click", () => {
    const numeric = header.classList.contains("number");
    const current = header.getAttribute("aria-sort");
    sort(column, current ? current === "ascending" : numeric);
  });
});
search.addEventListener("input", filter);
answer.addEventListener("change", filter);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== search) {
    event.preventDefault();
    search.focus();
  }
});
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  store((storage) => storage.setItem(THEME, root.dataset.theme));
});

// Storage may be forbidden, for example for files: the choice then lasts as long as the page.
const THEME = "archaware-theme";
function store(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}
const theme = store((storage) => storage.getItem(THEME));
if (theme === "light" || theme === "dark") root.dataset.theme = theme;

// Shows the view of the address, also when a link within the page changes it.
function show() {
  state = new URLSearchParams(location.hash.slice(1));
  search.value = state.get("q") ?? "";
  answer.value = state.get("show") ?? "";
  const sorted = state.get("sort");
  if (sorted !== null) {
    const column = Math.abs(parseInt(sorted, 10));
    if (headers[column]?.querySelector("button")) sort(column, sorted.startsWith("-"));
  }
  filter();
}
window.addEventListener("hashchange", show);
show();
