/* What is wrong with a page as it is shown. Contrast is that of WCAG 2.2: (lighter + 0.05) / (darker + 0.05) of relative
   luminances, 4.5 at least, and 3 for large texts (24 pixels, or 18.66 in bold). No command is cut. */
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  canvas.canvas.width = canvas.canvas.height = 1;
  const parsed = new Map();
  function rgba(colour) {
    if (!parsed.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      parsed.set(colour, [r, g, b, a / 255]);
    }
    return parsed.get(colour);
  }
  const over = (front, back) => front.slice(0, 3).map((value, k) => value * front[3] + back[k] * (1 - front[3]));
  const linear = value => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  function behind(element) {
    const layers = [];
    for (let each = element; each; each = each.parentElement) layers.push(rgba(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((back, front) => over(front, back), over(rgba("Canvas"), [255, 255, 255]));
  }
  const hidden = element => !element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  function shown(element) {
    const box = element.getBoundingClientRect();
    return box.width > 1 && box.height > 1 && !hidden(element);
  }
  const low = [], seen = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, said = texts.currentNode.data.trim();
    if (!said || seen.has(element) || ["SCRIPT", "STYLE", "NOSCRIPT", "OPTION", "TITLE", "text"].includes(element.tagName)
        || element.closest("svg, [aria-hidden=true]") || !shown(element)) continue;
    seen.add(element);
    const style = getComputedStyle(element), back = behind(element), front = over(rgba(style.color), back);
    const [a, b] = [luminance(front), luminance(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) low.push(`${ratio.toFixed(2)} ${element.tagName} "${said.slice(0, 40)}"`);
  }
  const named = each => each.labels?.length || each.getAttribute("aria-label") || each.getAttribute("aria-labelledby")
    || each.title || each.textContent.trim() || each.querySelector("[aria-label], title, img[alt]");
  const controls = [...document.querySelectorAll("input, select, button, a[href]")].filter(shown);
  const width = document.documentElement.clientWidth;
  const commands = [...document.querySelectorAll("pre code")].filter(each => /^\s*(\w+=\S+ )*(lowtide|pip) /.test(each.textContent));
  return {
    contrast: low,
    wider: document.documentElement.scrollWidth > width ? [document.documentElement.scrollWidth] : [],
    unnamed: controls.filter(each => !named(each)).map(each => each.outerHTML.slice(0, 100)),
    cut: commands.filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent.slice(0, 60)),
    unsaid: [...document.images].filter(each => !each.hasAttribute("alt")).map(each => each.src),
  };
})()
