"use strict";
// Without this script the page is complete. It shows the first 25 examples until asked for all, and adds search,
// filters, sorting, the way from a confused pair to its examples, and the words of a touched cell.
for (const controls of document.querySelectorAll(".controls")) {
  const table = document.getElementById(controls.dataset.for);
  const body = table.tBodies[0], rows = [...body.rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const field = (name) => document.getElementById(`${table.id}-${name}`);
  const count = controls.querySelector("output");
  const [rest, printed] = ["rest", "printed"].map((name) => document.querySelector(`.${name}[data-for="${table.id}"]`));
  let most = 25;
  const filter = () => {
    const words = field("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = !words.length && !field("expected")?.value && !field("predicted")?.value;
    let shown = 0;
    [...body.rows].forEach((row, place) => {
      const n = rows.indexOf(row);
      const fits = ["expected", "predicted"].every((name) => !field(name)?.value || row.dataset[name] === field(name).value);
      row.hidden = !(fits && words.every((word) => texts[n].includes(word))) || (all && place >= most);
      shown += !row.hidden;
    });
    rest.hidden = !all || rows.length <= most;
    count.textContent = shown === rows.length ? "" : `${shown} of ${rows.length}`;
    printed.textContent = shown === rows.length ? "" : `${shown} of the ${rows.length} examples are printed.`;
  };
  rest.querySelector("button").addEventListener("click", () => {
    most = Infinity;
    filter();
  });
  controls.hidden = false;
  controls.addEventListener("input", filter);
  controls.querySelector("button").addEventListener("click", () => {
    for (const one of controls.querySelectorAll("input, select")) one.value = "";
    filter();
  });
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    if (!head.classList.contains("number")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => {
        const text = row.cells[column].dataset.value;
        return text === "" ? null : Number(text);
      };
      const sorted = [...rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return up ? x - y : y - x;
      });
      body.append(...sorted);
      filter();
    });
  });
  filter();
}
for (const row of document.querySelectorAll(".pairs tbody tr")) {
  const table = document.getElementById(row.closest("table").dataset.examples);
  if (!table) continue;
  const choice = (name) => {
    const field = document.getElementById(`${table.id}-${name}`);
    const option = field && [...field.options].find((one) => one.text === row.cells[name === "expected" ? 0 : 1].textContent);
    return option && { field, value: option.value };
  };
  const both = ["expected", "predicted"].map(choice);
  if (!both.every(Boolean)) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.title = "Show these examples";
  button.append(...row.cells[2].childNodes);
  row.cells[2].append(button);
  button.addEventListener("click", () => {
    document.getElementById(`${table.id}-search`).value = "";
    for (const { field, value } of both) field.value = value;
    both[0].field.dispatchEvent(new Event("input", { bubbles: true }));
    table.scrollIntoView();
  });
}
for (const matrix of document.querySelectorAll(".matrix")) {
  const words = matrix.closest(".wide").querySelector(".cell-words"), usual = words.textContent;
  const show = (event) => {
    const cell = event.target.closest("td");
    words.textContent = (cell && cell.title) || usual;
  };
  matrix.addEventListener("pointerover", show);
  matrix.addEventListener("click", show);
}
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details:not(.more)")) one.open = true;
});
