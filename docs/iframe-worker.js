// Search pages that are opened from disk: there browsers start no workers, so the script of one runs in a hidden frame.
if (location.protocol === 'file:') {
  window.Worker = class {
    constructor(url) {
      const frame = document.createElement('iframe');
      frame.hidden = true;
      document.documentElement.append(frame);
      this.frame = frame;

      // Both sides get messages later and as copies, as from a worker.
      const scope = frame.contentWindow;
      scope.postMessage = data => {
        const message = new MessageEvent('message', {data: structuredClone(data)});
        setTimeout(() => this.onmessage?.(message));
      };
      const script = scope.document.createElement('script');
      script.src = new URL(url, location.href).href;
      this.loaded = new Promise((resolve, reject) => {
        script.onload = () => resolve(scope);
        script.onerror = reject;
      });
      this.loaded.catch(error => this.onerror?.(error));
      scope.document.head.append(script);
    }

    postMessage(data) {
      const message = new MessageEvent('message', {data: structuredClone(data)});
      this.loaded.then(scope => scope.dispatchEvent(message), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
