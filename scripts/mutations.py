"""The faults that `mutants.py` puts into the code: a table, as long as there are faults worth noticing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` becomes `new` in `file`, a path below the package; `tests` are paths below tests/."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    # Shots.
    Mutation(
        'a shot is the item itself',
        'prompts/fewshot.py',
        'while replacement in chosen or replacement == index:',
        'while replacement in chosen:',
        'prompts/test_fewshot.py',
    ),
    Mutation(
        'off by one in the shots that there can be',
        'prompts/fewshot.py',
        'min(num_shots, num_examples - 1)',
        'min(num_shots, num_examples)',
        'prompts/test_fewshot.py',
    ),
    Mutation(
        'categories unsorted',
        'scores/metrics.py',
        'names = sorted({result.category for result in results if result.category is not None})',
        'names = list(dict.fromkeys(result.category for result in results if result.category is not None))',
        'scores/test_metrics.py records/test_results.py',
    ),
    Mutation(
        'a fixed shot that asks the item itself',
        'prompts/fewshot.py',
        'spare if questions[shot] == question else shot',
        'shot',
        'prompts/test_fewshot.py',
    ),
    # What is scored.
    Mutation(
        'shifted logits',
        'engine/layout.py',
        "places.append((ids.astype('>i4').tobytes(), len(context) - 1 - self.num_kept, len(continuation)))",
        "places.append((ids.astype('>i4').tobytes(), len(context) - 2 - self.num_kept, len(continuation)))",
        'engine/test_layout.py engine/test_plan.py',
    ),
    Mutation(
        'shifted logits of padded rows',
        'engine/layout.py',
        'places.append((index, len(context) - 1, len(continuation)))',
        'places.append((index, len(context), len(continuation)))',
        'engine/test_layout.py engine/test_plan.py',
    ),
    Mutation(
        'the last token of a continuation is an input',
        'engine/layout.py',
        'return np.concatenate([context, continuation[:-1]])',
        'return np.concatenate([context, continuation])',
        'engine/test_layout.py engine/test_plan.py',
    ),
    Mutation(
        'tree attention leaks to a sibling',
        'engine/tree_attention.py',
        ' & (span.of(self.ends, 0) > places[queries, None])',
        '',
        'engine/test_tree_attention.py',
    ),
    Mutation(
        'a branch is computed without its path',
        'engine/tree_attention.py',
        'places = [np.arange(num_kept), num_kept + above, np.arange(num_kept + start, num_kept + stop)]',
        'places = [np.arange(num_kept), np.arange(num_kept + start, num_kept + stop)]',
        'engine/test_tree_attention.py',
    ),
    Mutation(
        'a window that counts one token too many',
        'engine/tree_attention.py',
        '- span.of(self.depths, 0) < window',
        '- span.of(self.depths, 0) <= window',
        'engine/test_tree_attention.py',
    ),
    Mutation(
        'positions in the stream instead of in the tree',
        'engine/layout.py',
        'depths=(np.repeat(firsts, lengths) + within).astype(np.int32)',
        'depths=np.arange(self.length, dtype=np.int32)',
        'engine/test_layout.py engine/test_plan.py',
    ),
    Mutation(
        'all tokens that tie with the best are the best',
        'engine/logits.py',
        'return below_top - logsumexp[rows], argmax[rows] == targets, num_top',
        'return below_top - logsumexp[rows], is_top, num_top',
        'engine/test_logits.py',
    ),
    Mutation(
        'probabilities without their sum',
        'engine/logits.py',
        'return below_top - logsumexp[rows], argmax',
        'return below_top, argmax',
        'engine/test_logits.py',
    ),
    # Plans.
    Mutation(
        'a batch over its budget',
        'engine/plan.py',
        'if group and num_tokens + tree.num_tokens > tokens_per_batch:',
        'if group and num_tokens > tokens_per_batch:',
        'engine/test_plan.py',
    ),
    Mutation(
        'batches that depend on the order of requests',
        'engine/plan.py',
        'shapes = sorted(map(shape_of, requests), key=lambda shape: (shape.spelled, shape.request.key))',
        'shapes = sorted(map(shape_of, requests), key=lambda shape: shape.spelled)',
        'engine/test_plan.py',
    ),
    Mutation(
        'ranks with different numbers of forwards',
        'engine/assign.py',
        'return [rank + [filler] * (longest - len(rank)) for rank in ranks]',
        'return ranks',
        'engine/test_plan.py',
    ),
    Mutation(
        'unscorable items are asked',
        'engine/plan.py',
        'scorable = [request for request in requests if request.unscorable is None]',
        'scorable = list(requests)',
        'engine/test_plan.py',
    ),
    # Verdicts.
    Mutation(
        'sum for mean of a choice',
        'judging/likelihood.py',
        'means = [float(logprobs.mean()) for logprobs in output.logprobs]',
        'means = [float(logprobs.sum()) for logprobs in output.logprobs]',
        'judging/test_likelihood.py',
    ),
    Mutation(
        'a tie goes to the first choice',
        'judging/likelihood.py',
        'credit=1 / len(tied) if gold in tied else 0.0,',
        'credit=float(tied[0] == gold),',
        'judging/test_likelihood.py',
    ),
    Mutation(
        'a widened tolerance of ties',
        'judging/likelihood.py',
        'TIE_TOLERANCE = 1e-6',
        'TIE_TOLERANCE = 1e-3',
        'judging/test_likelihood.py',
    ),
    Mutation(
        'what is not finite counts as wrong',
        'judging/likelihood.py',
        '    if not all(map(math.isfinite, means)):\n        return Judgement.unscored(NON_FINITE)\n',
        '',
        'judging/test_likelihood.py',
    ),
    Mutation(
        'one token right of many',
        'judging/likelihood.py',
        'right = bool(is_argmax.all())',
        'right = bool(is_argmax.any())',
        'judging/test_likelihood.py',
    ),
    Mutation(
        'a stop string is kept',
        'judging/text.py',
        'return text[: stop_position(text, rule)]',
        'return text',
        'judging/test_text.py',
    ),
    Mutation(
        'the last stop ends a reply',
        'judging/text.py',
        'return min(found, default=None)',
        'return max(found, default=None)',
        'judging/test_text.py',
    ),
    Mutation(
        'the first delimiter of a chain of thought',
        'judging/text.py',
        'return text.split(cot_delimiter)[-1]',
        'return text.split(cot_delimiter)[min(1, text.count(cot_delimiter))]',
        'judging/test_text.py tasks/test_generation_tasks.py',
    ),
    Mutation(
        'an empty right answer is met by everything',
        'judging/text.py',
        'if given.startswith(wanted) if wanted or reference else is_same_text(answer, gold):',
        'if given.startswith(wanted):',
        'judging/test_text.py',
    ),
    Mutation(
        'a right answer anywhere in the answer',
        'judging/text.py',
        'if given.startswith(wanted) if',
        'if wanted in given if',
        'judging/test_text.py',
    ),
    # Replies.
    Mutation(
        'a reply one token longer than its limit',
        'engine/reply.py',
        'elif len(self.ids) == self.request.max_new_tokens:',
        'elif len(self.ids) > self.request.max_new_tokens:',
        'engine/test_reply.py',
    ),
    Mutation(
        'stops of the prompt',
        'engine/reply.py',
        'if stop_position(text, rule, max(0, known - self._lookback)) is None:',
        'if stop_position(text, rule, known) is None:',
        'engine/test_reply.py',
    ),
    Mutation(
        'the token that completes top_p is dropped',
        'engine/sampling.py',
        'masked_fill(before >= sampling.top_p, 0.0)',
        'masked_fill(before + probabilities > sampling.top_p, 0.0)',
        'engine/test_sampling.py',
    ),
    Mutation(
        'temperature applied twice',
        'engine/sampling.py',
        '(logits.double() / sampling.temperature)',
        '(logits.double() / sampling.temperature**2)',
        'engine/test_sampling.py',
    ),
    Mutation(
        'prompts on one row of the cache see another',
        'engine/row_cache.py',
        '        self.mask[self._rows] = False\n        self.mask[self._rows, self._columns] = seen',
        '        self.mask[self._rows] = True\n        self.mask[self._rows, self._columns] = seen',
        'engine/test_row_cache.py engine/test_generation.py',
    ),
    # Scores.
    Mutation(
        'chance not subtracted',
        'scores/composites.py',
        'shift=-benchmark.random_baseline * scale)',
        'shift=0.0)',
        'scores/test_composites.py',
    ),
    Mutation(
        'not rescaled to 1',
        'scores/composites.py',
        'scale = 1 / (1 - benchmark.random_baseline) if',
        'scale = 1.0 if',
        'scores/test_composites.py',
    ),
    Mutation(
        'an average over the categories that are left',
        'scores/composites.py',
        '    if unknown or absent:\n',
        '    if unknown:\n',
        'scores/test_composites.py',
    ),
    Mutation(
        'weights forgotten in the sum of weights',
        'scores/composites.py',
        '[one / sum(weights) for one in weights]',
        '[one / len(weights) for one in weights]',
        'scores/test_composites.py',
    ),
    Mutation(
        'a mean over items in place of categories',
        'scores/metrics.py',
        '    if not names:\n',
        '    if names or not names:\n',
        'scores/test_metrics.py',
    ),
    Mutation(
        'pass@k with replacement',
        'scores/metrics.py',
        '1 - math.comb(n - c, k) / math.comb(n, k)\n',
        '1 - (1 - c / n) ** k\n',
        'tasks/test_code.py',
    ),
    Mutation(
        'unscored items left out of an accuracy',
        'scores/metrics.py',
        '    if allow_missing and scored:\n',
        '    if scored:\n',
        'scores/test_metrics.py tasks/test_generation_marks.py',
    ),
    Mutation(
        'an item that is missing is not noticed',
        'evaluation.py',
        '    if missing or unknown:\n',
        '    if unknown:\n',
        'records/test_results.py',
    ),
    # SCORE.
    Mutation(
        'swapped options that are not swapped back',
        'prompts/perturbations.py',
        'options=tuple(options), gold=place)',
        'options=tuple(options), gold=question.gold)',
        'prompts/test_perturbations.py',
    ),
    Mutation(
        'options that are moved along instead of swapped',
        'prompts/perturbations.py',
        'options[question.gold], options[place] = options[place], options[question.gold]',
        'options.insert(place, options.pop(question.gold))',
        'prompts/test_perturbations.py',
    ),
    Mutation(
        'no answer agrees with no answer',
        'scores/consistency.py',
        'Counter(result.answer for result in group if result.answer is not None)',
        'Counter(result.answer for result in group)',
        'scores/test_consistency.py',
    ),
    Mutation(
        'ordered pairs in place of unordered ones',
        'scores/consistency.py',
        'return agreeing / math.comb(len(group), 2)',
        'return agreeing / len(group) ** 2 * 2',
        'scores/test_consistency.py',
    ),
    Mutation(
        'n in place of n - 1 in a standard error',
        'scores/statistics.py',
        'math.sqrt(len(numbers) / (len(numbers) - 1))',
        '1.0',
        'scores/test_consistency.py scores/test_statistics.py',
    ),
    # Data and programs.
    Mutation(
        'subsets that are not nested',
        'data/subsets.py',
        '        if taken and len(taken) + len(group) > num_items:\n            break',
        '        if taken and len(taken) + len(group) > num_items:\n            continue',
        'data/test_subsets.py',
    ),
    Mutation(
        'a completion whose result is never compared',
        'judging/code/runners/python_runner.py',
        "return candidate.failure or (None if candidate.num_calls else 'the test makes no call')",
        'return None',
        'judging/code/test_judge.py',
    ),
    Mutation(
        'an assertion that fails is no failure',
        'judging/code/runners/python_runner.py',
        'except AssertionError:\n        return f',
        'except AssertionError:\n        return None and f',
        'judging/code/test_judge.py',
    ),
    # What other packages add.
    Mutation(
        'an installed type in place of ours',
        'tasks/__init__.py',
        'if task_type.name in types:',
        'if not types:',
        'test_extending.py',
    ),
    Mutation(
        'two metrics of one name',
        'tasks/__init__.py',
        'if names.count(name) > 1',
        'if names.count(name) > 2',
        'test_extending.py',
    ),
    Mutation(
        'a key of another type accepted',
        'suite.py',
        "            if isinstance(name, str):\n                problems.add(f'{path}.{key}'",
        "            if name is None:\n                problems.add(f'{path}.{key}'",
        'config/test_load.py',
    ),
    Mutation(
        "the reference's rate of a perturbation that it does not know",
        'tasks/robustness.py',
        'reference_consistency=reference if perturbation in PERTURBATIONS else None',
        'reference_consistency=reference',
        'test_extending.py',
    ),
    # Statistics.
    Mutation(
        'items in place of clusters',
        'scores/statistics.py',
        '        return int(result.cluster, 16)\n',
        '        return int(result.cluster, 16) + key.row\n',
        'scores/test_statistics.py',
    ),
    Mutation(
        'parts of a sum that are taken to be independent',
        'scores/statistics.py',
        'deviations = np.zeros(len(numbers))\n    np.add.at(deviations, places, np.concatenate(parts))',
        'deviations = np.zeros(len(numbers))\n    np.add.at(deviations, places, np.concatenate(parts) ** 2)\n'
        '    deviations = np.sqrt(deviations)',
        'scores/test_statistics.py',
    ),
    Mutation(
        'runs that are compared as if they had other items',
        'scores/comparison.py',
        'found = weighted_sum([second, first], [1.0, -1.0])',
        'found = weighted_sum([second, first], [1.0, -1.0])\n'
        '    error = math.hypot(first.standard_error or 0, second.standard_error or 0)\n'
        '    scale = error / (found.standard_error or error or 1)\n'
        '    found = Measure(value=found.value, spread=weighted_sum([found], [scale]).spread)',
        'scores/test_comparison.py',
    ),
    Mutation(
        'p-values corrected by the number of all and not of those that are left',
        'scores/comparison.py',
        'value * (len(known) - rank)',
        'value * len(known)',
        'scores/test_comparison.py',
    ),
    Mutation(
        'prompts that differ are paired',
        'report/comparison.py',
        '    check_prompts(first, second, tasks)\n    common',
        '    common',
        'report/test_uncomparable_runs.py',
    ),
    Mutation(
        'calibration gaps that do not cancel within a bin',
        'scores/likelihood.py',
        'math.copysign(1.0, totals[place]) * gap',
        'abs(gap)',
        'scores/test_likelihood_metrics.py',
    ),
    Mutation(
        'bits per character',
        'scores/likelihood.py',
        'zip(scored(results), sizes(results, lambda r: r.num_bytes), strict=True)',
        'zip(scored(results), sizes(results, lambda r: r.num_characters), strict=True)',
        'scores/test_likelihood_metrics.py',
    ),
    Mutation(
        'choices alone after their own prompts',
        'tasks/items.py',
        "    return Prompt(preamble='', question=Question(contexts=(context,)",
        '    return Prompt(preamble=task.prompt_string, question=Question(contexts=(context,)',
        'tasks/test_pmi.py',
    ),
    Mutation(
        'a damaged line is used',
        'records/journal.py',
        'hashlib.sha256(content[start:end]).hexdigest()[:16].encode() == head[2]',
        "content[end : end + 1] == b'\\n'",
        'records/test_journal.py records/test_journal_damage.py',
    ),
    Mutation(
        'a budget shared out without regard to what items take',
        'scores/allocation.py',
        'task.deviation / math.sqrt(task.seconds + 1e-9)',
        'task.deviation',
        'scores/test_allocation.py',
    ),
    # What no score may depend on.
    Mutation(
        'positions that go on from tree to tree',
        'engine/layout.py',
        'depths=(np.repeat(firsts, lengths) + within).astype(np.int32)',
        'depths=np.arange(self.length, dtype=np.int32)',
        'test_invariance.py',
    ),
    Mutation(
        'a token that sees the tree before its own',
        'engine/tree_attention.py',
        ' & (span.of(self.ends, 0) > places[queries, None])',
        '',
        'test_invariance.py',
    ),
    Mutation(
        "the last unit of batches is nobody's",
        'engine/assign.py',
        '    for unit in units:\n        load, rank',
        '    for unit in units[:-1]:\n        load, rank',
        'test_invariance.py',
    ),
    Mutation(
        'sums that are rounded at every step',
        'scores/statistics.py',
        '    return math.fsum(values) / len(values)',
        '    return sum(values) / len(values)',
        'test_invariance.py scores/test_statistics.py',
    ),
    Mutation(
        "shots that are drawn from the process's own generator",
        'prompts/fewshot.py',
        '        chosen = set(rng.sample(range(num_examples), num_shots))',
        '        chosen = set(random.sample(range(num_examples), num_shots))',
        'test_invariance.py',
    ),
    Mutation(
        'shots that are drawn from the subset alone',
        'tasks/items.py',
        '    pairs = with_shots(examples, num_shots',
        '    pairs = with_shots(asked, num_shots',
        'test_invariance.py',
    ),
    Mutation(
        'a batch with one finished item counts as finished',
        'composer/loader.py',
        'if not finished.issuperset(request.key for request in part.requests)',
        'if finished.isdisjoint(request.key for request in part.requests)',
        'integration/test_resume.py',
    ),
)
