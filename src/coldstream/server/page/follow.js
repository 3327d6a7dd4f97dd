// Keeps the end of a text in view while it grows, as long as the reader is there.

const NEAR = 32; // pixels from the end that count as the end

export class Follower {
  // scroller: scrolls `content`; button: shown while the end is out of view
  constructor(scroller, content, button) {
    this.scroller = scroller;
    this.button = button;
    this.isFollowing = true;
    this.top = 0;
    scroller.addEventListener("scroll", () => this.scrolled(), { passive: true });
    const observer = new ResizeObserver(() => this.grown());
    observer.observe(content);
    observer.observe(scroller);
    button.addEventListener("click", () => {
      this.toEnd();
      scroller.focus({ preventScroll: true });
    });
  }

  toEnd() {
    this.isFollowing = true;
    this.grown();
  }

  grown() {
    if (this.isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.scrolled();
  }

  // Growth leaves the position as it is, so a smaller one comes from the reader.
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const distance = scrollHeight - scrollTop - clientHeight;
    if (distance <= NEAR) this.isFollowing = true;
    else if (scrollTop < this.top) this.isFollowing = false;
    this.top = scrollTop;
    this.button.hidden = this.isFollowing || distance <= NEAR;
  }
}
