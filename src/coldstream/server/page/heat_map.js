// The experts as a picture: a row for each layer, a column for each expert.
// Colour says where an expert lies, its strength how often recent steps used it.

const SHADES = {
  light: { none: [232, 236, 241], fast: [11, 87, 164], slow: [184, 67, 10] },
  dark: { none: [38, 46, 56], fast: [108, 182, 255], slow: [255, 157, 92] },
};
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const dark = matchMedia("(prefers-color-scheme: dark)");

export class HeatMap {
  // readout: the element that says what a cell is
  constructor(canvas, summary, readout) {
    this.canvas = canvas;
    this.summary = summary;
    this.readout = readout;
    this.cell = [0, 0];
    this.isChosen = false;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.move(event));
    dark.addEventListener("change", () => this.draw());
  }

  // experts: of the server's live state, or null
  show(experts) {
    this.experts = experts && {
      layers: experts.layers,
      width: experts.num_experts,
      uses: bytes(experts.uses),
      resident: experts.resident === null ? null : bytes(experts.resident),
    };
    this.canvas.hidden = !experts;
    this.draw();
    if (this.isChosen) this.describe();
  }

  draw() {
    if (!this.experts) {
      this.summary.textContent = "This engine does not note which experts are used.";
      return;
    }
    const { layers, width, uses, resident } = this.experts;
    const shades = SHADES[dark.matches ? "dark" : "light"];
    const most = uses.reduce((a, b) => Math.max(a, b), 1);
    const image = new ImageData(width, layers.length);
    uses.forEach((use, index) => {
      const full = resident && !resident[index] ? shades.slow : shades.fast;
      // An expert that lies in fast memory shows even when nothing uses it.
      const least = resident && resident[index] ? 0.15 : 0;
      const share = Math.max(least, Math.sqrt(use / most));
      full.forEach((value, part) => {
        image.data[4 * index + part] = shades.none[part] + share * (value - shades.none[part]);
      });
      image.data[4 * index + 3] = 255;
    });
    this.canvas.width = width;
    this.canvas.height = layers.length;
    this.canvas.style.aspectRatio = `${width} / ${Math.max(layers.length, width / 8)}`;
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    const used = uses.reduce((count, use) => count + (use > 0), 0);
    const there = resident === null ? "All are in fast memory." : `${sum(resident)} are in fast memory.`;
    this.summary.textContent = `${uses.length} experts in ${layers.length} layers, ${used} used lately. ${there}`;
  }

  point(event) {
    if (!this.experts) return;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.experts.layers.length);
    this.choose(row, Math.floor(((event.clientX - box.left) / box.width) * this.experts.width));
  }

  move(event) {
    const by = MOVES[event.key];
    if (!by || !this.experts) return;
    event.preventDefault();
    this.choose(this.cell[0] + by[0], this.cell[1] + by[1]);
  }

  choose(row, column) {
    const within = (value, end) => Math.min(Math.max(value, 0), end - 1);
    this.cell = [within(row, this.experts.layers.length), within(column, this.experts.width)];
    this.isChosen = true;
    this.describe();
  }

  describe() {
    if (!this.experts) return;
    const [row, column] = this.cell;
    const index = row * this.experts.width + column;
    const share = Math.round((100 * this.experts.uses[index]) / 255);
    const place = this.experts.resident === null || this.experts.resident[index] ? "in fast memory" : "elsewhere";
    this.readout.textContent = `Layer ${this.experts.layers[row]}, expert ${column}: used by ${share} % of recent steps, ${place}.`;
  }
}

function bytes(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}
