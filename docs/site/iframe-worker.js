/* The search runs in a Worker, which browsers refuse to pages that were opened as files. There it runs in a hidden frame
   of the page instead, behind the part of Worker's interface that the theme uses. */
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      // Firefox may replace a frame's first document after this, and its window with it, but not one that was written.
      this.frame.contentDocument.open();
      this.frame.contentDocument.close();
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => load(inside, one)));
      load(inside, url)
        .then(() => {
          this.loaded = true;
          this.waiting.splice(0).forEach((data) => this.postMessage(data));
        })
        .catch((error) => {
          console.error(error);
          this.dispatchEvent(new ErrorEvent("error", { error, message: error.message }));
        });
    }
    postMessage(data) {
      if (!this.loaded) {
        this.waiting.push(data);
        return;
      }
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };

  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${url} cannot be loaded`));
      inside.document.head.append(script);
    });
}
