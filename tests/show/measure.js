// Measures the documents in this page's frames, and writes what it finds into a <pre>.

function channels(colour) {
  const [r, g, b, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
  return { rgb: [r, g, b], alpha };
}

// How a light colour is perceived, as the Web Content Accessibility Guidelines define it.
function luminance(rgb) {
  const [r, g, b] = rgb.map((x) => x / 255).map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

// The contrast of an element's text with what is behind it.
function contrastOf(element, view) {
  const svg = element instanceof view.SVGElement;
  let { rgb, alpha } = channels(view.getComputedStyle(element)[svg ? "fill" : "color"]);
  for (let x = element; x; x = x.parentElement) alpha *= Number(view.getComputedStyle(x).opacity);
  const box = element.classList.contains("name") ? element.previousElementSibling : element.ownerDocument.body;
  const style = view.getComputedStyle(box);
  const behind = channels(svg && box.tagName === "rect" ? style.fill : style.backgroundColor).rgb;
  return contrast(rgb.map((x, i) => x * alpha + behind[i] * (1 - alpha)), behind);
}

function isText(element) {
  return [...element.childNodes].some((x) => x.nodeType === Node.TEXT_NODE && x.textContent.trim());
}

// The words of an element that are on two lines.
function brokenIn(element) {
  const document = element.ownerDocument;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const word of node.textContent.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((x) => Math.round(x.top)));
      if (lines.size > 1) found.push(word[0]);
    }
  }
  return found;
}

function measured(frame) {
  const { contentDocument: page, contentWindow: view } = frame;
  const elements = [...page.querySelectorAll(".mylib-show *")].filter((x) => x.getClientRects().length);
  const texts = elements.filter((x) => isText(x) && !["title", "style"].includes(x.tagName));
  const names = elements.filter((x) => x.classList.contains("name"));
  const describe = (x) => `${x.tagName} ${x.textContent.slice(0, 40)}`;
  return {
    scrolls: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    // Nothing scrolls or sticks out inside the page either.
    wide: elements.filter((x) => x.getBoundingClientRect().right > view.innerWidth + 1).map(describe),
    // Texts that are larger than their cell.
    cramped: names.filter((x) => x.getBBox().width > x.previousElementSibling.getBBox().width).map(describe),
    tiny: texts.filter((x) => x.getBoundingClientRect().height < 8).map(describe),
    faint: texts.filter((x) => contrastOf(x, view) < 4.5).map(describe),
    // Words of tables that are broken, which only narrow pages may.
    broken: view.innerWidth < 720 ? [] : [...page.querySelectorAll(".mylib-show td")].flatMap(brokenIn),
    texts: texts.length,
  };
}

addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => [frame.id, measured(frame)]);
  const result = document.createElement("pre");
  result.id = "measured";
  result.textContent = JSON.stringify(Object.fromEntries(found));
  document.body.append(result);
});
