// What a completion and a test have in common, as a function that is called in the context which it is for: values are
// of that context's own kinds. `run` runs a text in it.
(fs, run, console) => {
  'use strict'

  const MAX_LINE = 64 * 2 ** 20
  const PIECE = 65536
  const MAX_ITEMS = 10 ** 6 // of an iterator
  const TYPED = ['Int8', 'Uint8', 'Uint8Clamped', 'Int16', 'Uint16', 'Int32', 'Uint32', 'Float32', 'Float64', 'BigInt64',
    'BigUint64'].map((name) => `${name}Array`)
  const FAILURES = /^([A-Za-z ]{1,40} (in a call|before the first call)|the result of a call is no plain value)$/

  class NotPlain extends Error {}
  class CompletionFailed extends Error {}

  const own = { isArray: Array.isArray, entries: Object.entries, stringify: JSON.stringify, parse: JSON.parse }

  // A plain value as JSON has it.
  function encode(value) {
    if (value === undefined) return { undefined: 0 }
    if (typeof value === 'bigint') return { bigint: value.toString() }
    if (typeof value === 'number' && (!Number.isFinite(value) || Object.is(value, -0))) {
      return { number: Object.is(value, -0) ? '-0' : String(value) }
    }
    if (value === null || ['number', 'string', 'boolean'].includes(typeof value)) return value
    if (typeof value !== 'object') throw new NotPlain()
    if (value instanceof Number || value instanceof String || value instanceof Boolean) return encode(value.valueOf())
    if (own.isArray(value)) return Array.from(value, encode)
    if (value instanceof Map) return { map: Array.from(value, ([key, item]) => [encode(key), encode(item)]) }
    if (value instanceof Set) return { set: Array.from(value, encode) }
    if (ArrayBuffer.isView(value) && !(value instanceof DataView)) {
      return { typed: [value.constructor.name, Array.from(value, encode)] }
    }
    if (value instanceof Date || value instanceof Promise || typeof value.then === 'function') throw new NotPlain()
    if (typeof value.next === 'function' && typeof value[Symbol.iterator] === 'function') {
      const items = []
      for (const item of value) if (items.push(encode(item)) > MAX_ITEMS) throw new NotPlain()
      return { iterator: items }
    }
    return { object: own.entries(value).map(([key, item]) => [key, encode(item)]) }
  }

  // The value that `encode` had, of this program's own kinds.
  function decode(value) {
    if (own.isArray(value)) return value.map(decode)
    if (value === null || typeof value !== 'object') return value
    const [[kind, content]] = own.entries(value)
    switch (kind) {
      case 'undefined': return undefined
      case 'bigint': return BigInt(content)
      case 'number': return Number(content)
      case 'map': return new Map(content.map(([key, item]) => [decode(key), decode(item)]))
      case 'set': return new Set(content.map(decode))
      case 'iterator': return content.map(decode)[Symbol.iterator]()
      case 'typed': {
        if (!TYPED.includes(content[0])) throw new NotPlain()
        return globalThis[content[0]].from(content[1].map(decode))
      }
      case 'object': {
        const made = {}
        for (const [key, item] of content) {
          Object.defineProperty(made, String(key), {
            value: decode(item), writable: true, enumerable: true, configurable: true,
          })
        }
        return made
      }
      default: throw new NotPlain()
    }
  }

  class Lines {
    constructor(descriptor) {
      this.descriptor = descriptor
      this.pieces = []
      this.size = 0
    }

    // The next line, null at the end.
    read() {
      for (;;) {
        const last = this.pieces.length - 1
        const end = last < 0 ? -1 : this.pieces[last].indexOf(10)
        if (end >= 0) {
          const whole = Buffer.concat(this.pieces)
          const stop = whole.length - this.pieces[last].length + end
          this.pieces = [whole.subarray(stop + 1)]
          this.size = this.pieces[0].length
          return whole.subarray(0, stop).toString()
        }
        const piece = Buffer.alloc(PIECE)
        const count = fs.readSync(this.descriptor, piece, 0, PIECE, null)
        if (count === 0 || this.size > MAX_LINE) return null
        this.pieces.push(piece.subarray(0, count))
        this.size += count
      }
    }
  }

  function send(descriptor, message) {
    const bytes = Buffer.from(own.stringify(message) + '\n')
    for (let done = 0; done < bytes.length;) done += fs.writeSync(descriptor, bytes, done)
  }

  // The name of an exception's kind, which carries no text of the program's.
  function kindOf(error) {
    for (const kind of [RangeError, ReferenceError, SyntaxError, TypeError, EvalError, URIError]) {
      if (error instanceof kind) return kind.name
    }
    return 'an exception'
  }

  function serve(program, calls, results) {
    let target
    try {
      run(program.code, { filename: 'program.js' })
      target = run(program.target)
      if (typeof target !== 'function') throw new TypeError()
    } catch (error) {
      send(results, { failed: `${kindOf(error)} before the first call` })
      return
    }
    send(results, { ready: true })
    const lines = new Lines(calls)
    for (let line = lines.read(); line !== null; line = lines.read()) {
      let answer
      try {
        answer = { value: encode(target(...decode(own.parse(line).args))) }
      } catch (error) {
        answer = {
          failed: error instanceof NotPlain ? 'the result of a call is no plain value' : `${kindOf(error)} in a call`,
        }
      }
      send(results, answer)
    }
  }

  // Runs a test, and gives what says why it fails, once all that it may have left to be done later is done.
  function runTest(program, calls, results) {
    const lines = new Lines(results)
    let numCalls = 0
    let numFailed = 0
    let firstFailed = 0
    const answer = () => {
      const line = lines.read()
      if (line === null) throw new CompletionFailed('the program ended before its test did')
      let message
      try {
        message = own.parse(line)
        if ('value' in message) return decode(message.value)
      } catch (error) {
        throw new CompletionFailed('the result of a call is no plain value')
      }
      if (message.ready !== true) {
        throw new CompletionFailed(FAILURES.test(message.failed) ? message.failed : 'a call failed')
      }
      return undefined
    }
    let failure = null // kept beside the exception, which a test might catch
    const candidate = (...args) => {
      numCalls += 1
      try {
        send(calls, { args: encode(args) })
        return answer()
      } catch (error) {
        if (error.code === 'EPIPE') error = new CompletionFailed('the program ended before its test did')
        if (error instanceof CompletionFailed && failure === null) failure = error.message
        throw error
      }
    }
    const check = (holds) => {
      if (holds) return
      numFailed += 1
      if (numFailed === 1) firstFailed = numCalls
    }
    const outcome = (error) => {
      if (failure !== null) return failure
      if (error instanceof CompletionFailed) return error.message
      if (error !== null) return `${kindOf(error)} in the test, after call ${numCalls}`
      if (numFailed) return `call ${firstFailed}: the result is not the expected one`
      return numCalls ? null : 'the test makes no call'
    }
    let thrown = null
    try {
      answer() // that it is ready
      console.assert = check
      globalThis.gauntletCandidate = candidate
      const named = `${program.prelude}\n;const ${program.target} = gauntletCandidate;\n`
      if (program.pairs === null) {
        run(named + program.test, { filename: 'test.js' })
      } else {
        run(named)
        for (const [given, wanted] of program.pairs) {
          const results = run(`[${program.target}(${given})]`)
          check(own.stringify(results[0]) === own.stringify(run(`[${wanted}]`)[0]))
        }
      }
    } catch (error) {
      thrown = error
    }
    return (error) => outcome(thrown ?? error)
  }

  return { serve, runTest, send }
}
