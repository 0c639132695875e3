// Search runs in a worker, which browsers do not start for pages that are opened as files. There, this runs the worker's
// script in a hidden frame of the page instead.
if (location.protocol === "file:") {
  window.Worker = class FrameWorker extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.inside = this.frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      this.ready = new Promise(resolve => script.addEventListener("load", resolve))
      script.src = new URL(address, location.href).href
      this.inside.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
