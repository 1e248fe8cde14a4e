// Runs in the sandbox, on its own: a completion that answers calls, or the tests that make them.
//
//     node node_runner.js completion CALLS RESULTS
//     node node_runner.js tests OUTCOMES CALLS RESULTS [CALLS RESULTS ...]
//
// CALLS, RESULTS and OUTCOMES are descriptors. Standard input has a line of JSON with the completion's program, or one
// for each test, which is run in a context of its own with the next pair of descriptors. Calls and results are lines of
// JSON with plain values alone: what a test compares are its own objects, whatever the completion returned.
'use strict'

const fs = require('fs')
const path = require('path')
const vm = require('vm')

const IDLE_MILLISECONDS = 30000
const PIECE = 65536
const NEWLINE = 10
const calls = new vm.Script(fs.readFileSync(path.join(__dirname, 'node_calls.js')), { filename: 'node_calls.js' })

// Calls a function with what the next line of standard input has as JSON. Ends at its end, or if there is none for a
// while: at once, as the thread that reads would be waited for. (`process.stdin` takes a fourth of a start to load.)
function onNextLine(does) {
  const idle = setTimeout(() => process.kill(process.pid, 'SIGKILL'), IDLE_MILLISECONDS)
  const piece = Buffer.alloc(PIECE)
  fs.read(0, piece, 0, PIECE, null, (error, count) => {
    clearTimeout(idle)
    let line = Buffer.from(piece.subarray(0, count))
    for (; count > 0 && line[line.length - 1] !== NEWLINE; line = Buffer.concat([line, piece.subarray(0, count)])) {
      count = fs.readSync(0, piece)
    }
    if (!count) process.exit(0)
    does(JSON.parse(line))
  })
}

function runCompletion(callsEnd, resultsEnd) {
  const { serve } = calls.runInThisContext()(fs, vm.runInThisContext, console)
  globalThis.require = require
  onNextLine((program) => {
    serve(program, callsEnd, resultsEnd)
    process.exit(0)
  })
}

// A context that has what Node has, and nothing of other tests.
function newContext() {
  const context = vm.createContext()
  const run = (text, options) => vm.runInContext(text, context, options)
  const there = new Set(run('Object.getOwnPropertyNames(globalThis)'))
  for (const name of Object.getOwnPropertyNames(globalThis).filter((name) => !there.has(name))) {
    const get = () => globalThis[name]
    const set = (value) => Object.defineProperty(context, name, { value, writable: true })
    Object.defineProperty(context, name, { get, set, configurable: true })
  }
  context.global = run('globalThis')
  context.console = Object.create(console)
  context.require = require
  return calls.runInContext(context)(fs, run, context.console)
}

// Runs each test once the one before has nothing left to do.
function runTests(outcomes, pairs) {
  let context
  let outcome
  const files = fs.readdirSync('.').length
  const next = () => {
    context = newContext()
    onNextLine((program) => {
      outcome = context.runTest(program, ...pairs[0])
    })
  }
  const say = (error) => {
    const [callsEnd, resultsEnd] = pairs.shift()
    const reason = outcome(error)
    fs.closeSync(callsEnd)
    fs.closeSync(resultsEnd)
    context.send(outcomes, { passed: reason === null, reason })
    const leavesFiles = fs.readdirSync('.').length !== files // which the next test shall not find
    if (error !== null || leavesFiles || pairs.length === 0) process.exit(0)
    next()
  }
  process.on('unhandledRejection', say)
  process.on('uncaughtException', say)
  process.on('beforeExit', () => say(null))
  next()
}

function main(role, ...descriptors) {
  const numbers = descriptors.map(Number)
  if (role === 'completion') {
    runCompletion(...numbers)
    return
  }
  const pairs = []
  for (let place = 1; place < numbers.length; place += 2) pairs.push(numbers.slice(place, place + 2))
  runTests(numbers[0], pairs)
}

main(...process.argv.slice(2))
