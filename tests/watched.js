// Runs in a page before its own scripts, and keeps what it writes on canvases. `watched.faults()` lists what a reader
// could not read: text below 10 px, text in colours too close to their ground, text that is cut, a page that is wider
// than its window.
const watched = (() => {
  const LEAST_PX = 10, LEAST_CONTRAST = 4.5;
  const written = new Map(); // by canvas, what was written since it was last cleared

  const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    written.delete(this.canvas);
    return clearRect.apply(this, box);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
    if (text) {
      const width = this.measureText(text).width, place = this.getTransform().transformPoint(new DOMPoint(x, y));
      const before = { center: width / 2, right: width, end: width }[this.textAlign] ?? 0;
      const line = { text, left: place.x - before, right: place.x - before + width, y: place.y, colour: this.fillStyle,
        size: parseFloat(this.font.match(/([\d.]+)px/)[1]) };
      written.set(this.canvas, [...(written.get(this.canvas) || []), line]);
    }
    return fillText.call(this, text, x, y, ...rest);
  };

  function rgba(colour) {
    if (colour.startsWith("#")) {
      const pairs = colour.length < 6 ? [...colour.slice(1)].map((digit) => digit + digit) : colour.slice(1).match(/../g);
      return [...pairs.map((pair) => parseInt(pair, 16)), 255].slice(0, 3).concat(1);
    }
    const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
    return [red, green, blue, alpha];
  }

  function luminance([red, green, blue]) {
    const [r, g, b] = [red, green, blue].map((part) => part / 255).map((part) =>
      part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function ground(element) {
    for (let each = element; each; each = each.parentElement) {
      const colour = rgba(getComputedStyle(each).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  }

  function contrast(colour, under) {
    const [low, high] = [luminance(colour), luminance(under)].sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
  }

  // Without what a scrolling part of the page does not show.
  function inView(boxes, scrolling) {
    const view = scrolling?.getBoundingClientRect();
    return view ? boxes.filter((box) => box.bottom <= view.bottom && box.left < view.right) : boxes;
  }

  function texts() {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
      if (!text || element.closest("script, style") || !element.checkVisibility({ visibilityProperty: true })) continue;
      const style = getComputedStyle(element), scale = element instanceof SVGElement ? element.getScreenCTM().a : 1;
      const range = document.createRange();
      range.selectNodeContents(walker.currentNode);
      const box = range.getBoundingClientRect(), scrolls = element.closest(".scroll, pre");
      found.push({ text, size: parseFloat(style.fontSize) * scale, colour: style.color, ground: ground(element),
        cut: !scrolls && (box.left < -1 || box.right > innerWidth + 1), boxes: inView([...range.getClientRects()], scrolls) });
    }
    const touch = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4;
    const over = (one) => found.some((other) => one !== other && one.boxes.some((a) => other.boxes.some((b) => touch(a, b))));
    return found.map((each) => ({ ...each, over: over(each) }));
  }

  function drawn() {
    return [...document.querySelectorAll("canvas")].flatMap((canvas) => {
      const ratio = canvas.width / canvas.getBoundingClientRect().width, lines = written.get(canvas) || [];
      const near = (one, other) => one !== other && Math.abs(one.y - other.y) < 9 * ratio &&
        one.left < other.right && other.left < one.right;
      return lines.map((line) => ({ text: line.text, size: line.size / ratio, colour: line.colour, ground: ground(canvas),
        cut: line.left < -1 || line.right > canvas.width + 1, over: lines.some((other) => near(line, other)) }));
    });
  }

  function faults() {
    const all = [...texts(), ...drawn()], list = (wrong) => all.filter(wrong).map((each) => each.text.slice(0, 40));
    return {
      texts: all.length,
      charts: document.querySelectorAll("canvas").length,
      small: list((each) => each.size < LEAST_PX),
      pale: list((each) => contrast(rgba(each.colour), each.ground) < LEAST_CONTRAST),
      cut: list((each) => each.cut),
      over: list((each) => each.over),
      wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    };
  }

  return { faults };
})();
