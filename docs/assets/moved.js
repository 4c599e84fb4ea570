// Sends old addresses to new ones. tools/finish_site.py fills them in from tools/moved.json.
(() => {
  const MOVED = {};
  const root = new URL("..", document.currentScript.src).href;
  const page = location.href.split("#")[0].replace("index.html", "");
  const old = page.slice(root.length);
  const known = location.hash && document.getElementById(location.hash.slice(1));
  const target = MOVED[old + location.hash] ?? MOVED[old];
  if (target !== undefined && !known) location.replace(root + target);
})();
