// SPDX-License-Identifier: Apache-2.0
// What the access map says: how it is drawn, and what the pointer is at.

Object.assign(AccessMap.prototype, {
  tellStatus(byCells) {
    const { drawn } = this;
    let text = `${countText(drawn.marks)} marks in view`;
    if (this.pending && !byCells) text = "unpacking …";
    else if (drawn.mode === "shapes") text += ", each drawn by itself";
    else if (byCells) {
      const size = `${secondsText(pictures.seconds / cells.columns)} × ${bytesText(this.size / cells.rows)}`;
      text += `, in cells of ${size}`;
      text += this.pending ? "; unpacking …" : "; zoom in for single ones";
    }
    this.status.textContent = text;
  },

  tell(x, y) {
    if (this.shapes) {
      const near = nearestShape(this.shapes, x, y);
      if (near) return this.describe(near.piece, near.i);
    } else {
      const pick = this.nearestPick(x, y);
      if (pick) return this.describe(pick.piece, pick.i);
    }
    return this.describePlace(x, y);
  },

  nearestPick(x, y) {
    const { raster, ratio } = this;
    const [cx, cy] = [Math.round((x - LEFT) * ratio), Math.round((y - TOP) * ratio)];
    const r = Math.round(6 * ratio);
    let best = Infinity, pick = 0;
    for (let py = Math.max(0, cy - r); py <= Math.min(raster.h - 1, cy + r); py += 1) {
      for (let px = Math.max(0, cx - r); px <= Math.min(raster.w - 1, cx + r); px += 1) {
        const distance = (px - cx) ** 2 + (py - cy) ** 2;
        const found = raster.pick[py * raster.w + px];
        if (found && distance < best) {
          best = distance;
          pick = found;
        }
      }
    }
    if (!pick) return null;
    const segment = this.segments.find((s) => pick >= s.base && pick < s.base + s.n);
    return segment && { piece: segment.piece, i: pick - segment.base };
  },

  describe(piece, i) {
    const t = piece.start[i] * STEP_SECONDS;
    const offset = piece.offset[i] * piece.unit;
    const length = piece.length[i] * piece.unit;
    const took = this.lasted(piece, i);
    const about = pictures.exact ? "" : "about ";
    const lines = [
      `${rankName(piece.rank)}: ${pictures.kind_texts[piece.kind]}`,
      `at ${t.toFixed(6)} s`,
      `offset ${bytesText(offset)} (${countText(offset)}), page ${countText(offset / pictures.page_bytes)}`,
    ];
    const record = recordAt(this.file, offset);
    if (record) lines.push(record);
    if (piece.before[i] || length > pictures.page_bytes) {
      const low = offset - piece.before[i] * piece.unit;
      lines.push(`range ${bytesText(length)} from page ${countText(low / pictures.page_bytes)}`);
    }
    if (piece.kind === "missed") lines.push("waited until the pool had read it; how long is not told");
    else if (piece.layer === "miss") lines.push(`waited ${about}${secondsText(took)}`);
    else if (piece.layer === "ahead") lines.push(`there ${about}${secondsText(took)} until first used`);
    else if (piece.kind === "touch") lines.push(`answered after ${about}${secondsText(took)}`);
    else if (piece.kind === "seen") lines.push(`some time in the ${secondsText(took)} after that`);
    return lines;
  },

  // Where no single mark is: the cell, and how many marks of each rank are in it.
  describePlace(x, y) {
    const t = this.seconds(x), offset = this.offset(y);
    const lines = [`${secondsText(t)}, ${bytesText(offset)}`];
    if (!cells || !this.drawn.mode.startsWith("cells")) return lines;
    const column = Math.floor((t / pictures.seconds) * cells.columns);
    const index = column * cells.rows + Math.floor((offset / this.size) * cells.rows);
    for (const piece of cells.pieces) {
      if (piece.file !== this.file.id || !isShown(piece)) continue;
      const i = lowerBound(piece.index, index);
      if (piece.index[i] !== index) continue;
      lines.push(`${rankName(piece.rank)}: ${pictures.kind_texts[piece.kind]} × ${countText(piece.count[i])}`);
      if (lines.length > 12) break;
    }
    return lines;
  },
});

// Which record of the file a place is in, as far as the report knows where records lie.
function recordAt(file, offset) {
  const bytes = file.record_bytes;
  return bytes ? `about record ${countText(offset / bytes)} (${bytesText(bytes)} each, on average)` : null;
}
