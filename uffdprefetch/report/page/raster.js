// SPDX-License-Identifier: Apache-2.0
// Marks and cells into pixels: for many marks, where a path for each would take seconds.

const BAND_CODES = { kernel: 1, other: 2, warm: 3 };

// Pixels of a plot. Of a pixel that several ranks share each gets its part: the k-th to come takes
// it with probability 1/k (a reservoir of one), by a hash, so that the picture is always the same.
// The hash is one for a few pixels around, so that ranks show as specks and not as a mixed colour.
const SPECK_PIXELS = 4;

class Raster {
  constructor(w, h) {
    this.w = w;
    this.h = h;
    this.density = new Float32Array(w * h);
    this.shares = new Uint16Array(w * h);
    this.owner = new Uint8Array(w * h); // rank's colour + 1
    this.pick = new Uint32Array(w * h);
    this.miss = new Uint8Array(w * h); // 1 major, 2 late
    this.band = new Uint8Array(w * h);
    this.evicted = new Uint8Array(w * h);
  }

  clear() {
    for (const field of ["density", "shares", "owner", "pick", "miss", "band", "evicted"]) {
      this[field].fill(0);
    }
  }

  // Corners in pixels, the far ones exclusive, cut to the plot; null when nothing is left.
  cut(x0, y0, x1, y1) {
    const left = Math.max(0, Math.floor(x0));
    const top = Math.max(0, Math.floor(y0));
    const right = Math.min(this.w, Math.max(left + 1, Math.ceil(x1)));
    const bottom = Math.min(this.h, Math.max(top + 1, Math.ceil(y1)));
    return x1 < 0 || y1 < 0 || x0 >= this.w || y0 >= this.h || left >= right || top >= bottom
      ? null : [left, top, right, bottom];
  }

  demand(x0, y0, x1, y1, weight, colour, pick) {
    const box = this.cut(x0, y0, x1, y1);
    if (!box) return false;
    const { density, shares, owner, w } = this;
    for (let y = box[1]; y < box[3]; y += 1) {
      const line = y * w, speckLine = Math.floor(y / SPECK_PIXELS) * 65536;
      for (let x = box[0]; x < box[2]; x += 1) {
        const p = line + x;
        density[p] += weight;
        const k = shares[p] + 1;
        if (k < 65535) shares[p] = k;
        const speck = speckLine + Math.floor(x / SPECK_PIXELS);
        let hash = Math.imul(speck ^ Math.imul(k, 0x9e3779b1), 0x85ebca6b);
        hash = (hash ^ (hash >>> 13)) >>> 0;
        if (k === 1 || hash % k === 0) {
          owner[p] = colour + 1;
          this.pick[p] = pick;
        }
      }
    }
    return true;
  }

  fill(field, code, x0, y0, x1, y1, pick = 0) {
    const box = this.cut(x0, y0, x1, y1);
    if (!box) return false;
    const { w } = this;
    for (let y = box[1]; y < box[3]; y += 1) {
      const from = y * w + box[0], to = y * w + box[2];
      field.fill(code, from, to);
      if (pick) this.pick.fill(pick, from, to);
    }
    return true;
  }

  // The picture: bands below, accesses over them, misses over both.
  image(context, look, faintest) {
    const { w, h } = this;
    const image = context.createImageData(w, h);
    const out = new Uint32Array(image.data.buffer);
    const back = rgb(look.back);
    const ranks = look.ranks.map(rgb);
    const bands = [back, rgb(look.kernel), rgb(look.other), rgb(look.warm)];
    const misses = [null, rgb(look.major), rgb(look.late)];
    const evict = rgb(look.evict);
    let most = 1;
    for (let p = 0; p < this.density.length; p += 1) if (this.density[p] > most) most = this.density[p];
    const scale = 1 / Math.log1p(most);
    for (let y = 0, p = 0; y < h; y += 1) {
      for (let x = 0; x < w; x += 1, p += 1) {
        const code = this.band[p];
        let [r, g, b] = bands[code];
        // Hatched, for those who see no colours: what our service brought.
        const strength = code === 3 ? ((x + y) % 6 < 2 ? 0.62 : 0.36) : code ? 0.5 : 0;
        if (code) {
          r = back[0] + (r - back[0]) * strength;
          g = back[1] + (g - back[1]) * strength;
          b = back[2] + (b - back[2]) * strength;
        }
        if (this.evicted[p] && (x + y) % 3 === 0) [r, g, b] = evict;
        const count = this.density[p];
        if (count) {
          const alpha = faintest + (1 - faintest) * Math.log1p(count) * scale;
          const c = ranks[this.owner[p] - 1];
          r += (c[0] - r) * alpha;
          g += (c[1] - g) * alpha;
          b += (c[2] - b) * alpha;
        }
        // Where a rank read as well, both show: every other pixel.
        const miss = this.miss[p];
        if (miss && (!count || (x + y) % 2 === 0)) [r, g, b] = misses[miss];
        out[p] = 0xff000000 | (b << 16) | (g << 8) | r;
      }
    }
    return image;
  }
}
