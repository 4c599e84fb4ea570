// Asks the built site's own search: `node tools/search.js site WORDS...` prints, as JSON, the places
// that each of the words finds, best first. The worker is the one that a reader's browser runs.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...words] = process.argv.slice(2);
const folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find((name) => name.startsWith("search"));
const index = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));
// As the page asks: nothing is filtered.
const filter = {
  input: { type: "operator", data: { operator: "and", operands: [] } },
  aggregation: { input: [{ type: "term", data: { field: "tags" } }] },
};

let answered;
globalThis.self = { postMessage: (message) => answered(message) };
vm.runInThisContext(fs.readFileSync(path.join(folder, worker), "utf8"));

function ask(type, data) {
  return new Promise((done) => {
    answered = done;
    // A copy, as a browser makes of each message: the worker changes what it is given.
    self.onmessage({ data: structuredClone({ type, data }) });
  });
}

async function main() {
  await ask(0, index);
  const found = {};
  for (const word of words) {
    const { data } = await ask(2, { input: word, filter });
    found[word] = data.items.map((item) => index.items[item.id].location);
  }
  console.log(JSON.stringify(found));
}

main();
