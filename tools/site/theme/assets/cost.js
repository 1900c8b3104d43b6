// docs/cost.md on the site: its prices, examples and epochs can be changed, and the tables follow.
// Everything is read from the page's own tables, which `python benchmarks/minutes.py --write` makes.
(() => {
  "use strict";
  const headed = (first, last) => [...document.querySelectorAll("article table")].find((table) => {
    const heads = [...table.querySelectorAll("th")].map((one) => one.textContent.trim());
    return heads[0] === first && heads.at(-1) === last;
  });
  const number = (text) => Number(text.replaceAll(",", ""));
  const digits = (value) => (value >= 10 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 1 ? 1 : 2));
  const field = (name, value, step) => {
    const input = document.createElement("input");
    Object.assign(input, { type: "number", min: "0", step, value, inputMode: "decimal" });
    input.setAttribute("aria-label", name);
    return input;
  };

  const begin = () => {
    const prices = headed("machine", "$ an hour");
    const runs = headed("job", "transformers, $");
    if (!prices || !runs) return;

    const price = new Map();
    for (const row of prices.tBodies[0].rows) {
      const cell = row.cells[row.cells.length - 1];
      const input = field(`$ an hour of ${row.cells[0].textContent}`, cell.textContent.trim(), "any");
      cell.replaceChildren(input);
      price.set(row.cells[0].textContent.trim(), input);
    }

    const form = document.createElement("form");
    form.className = "cost-form";
    const examples = field("examples", "10000", "1");
    const epochs = field("epochs", "3", "any");
    for (const [name, input] of [["Examples", examples], ["Epochs", epochs]]) {
      const label = document.createElement("label");
      label.append(`${name} `, input);
      form.append(label);
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    const frame = runs.closest(".md-typeset__scrollwrap") || runs;
    frame.before(form);

    const jobs = [...runs.tBodies[0].rows].map((row) => {
      const texts = [...row.cells].map((cell) => cell.textContent.trim());
      const tokens = field(`tokens an example of ${texts[0]} on ${texts[1]}`, texts[2], "1");
      row.cells[2].replaceChildren(tokens);
      return { cells: row.cells, machine: texts[1], tokens, rates: [number(texts[3]), number(texts[4])] };
    });
    const update = () => {
      for (const job of jobs) {
        job.rates.forEach((rate, side) => {
          const minutes = (examples.value * epochs.value * job.tokens.value) / rate / 60;
          job.cells[5 + side].textContent = digits(minutes);
          job.cells[7 + side].textContent = digits((minutes / 60) * price.get(job.machine).value);
        });
      }
    };
    document.addEventListener("input", update);
    update();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
