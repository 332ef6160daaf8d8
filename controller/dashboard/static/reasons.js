// A sentence for each reason of a decision, with the numbers that led to it.

import { duration, isKnown, percent, short, whole, words } from "./format.js";

const n = (value) => whole(value);
const steps = (value) => (value === 1 ? "one inner step" : `${whole(value)} inner steps`);
const pressure = (t) => (t.unknown_servers > 0 ? `the load of ${n(t.unknown_servers)} server(s) is unknown, which counts as full` : `pressure is ${percent(t.pressure)}`);

const SENTENCES = {
  score_above_threshold: (t) => `the score ${short(t.score)} is over the threshold ${short(t.threshold)}: what the islands have learned is worth the sync`,
  score_below_threshold: (t) => `the score ${short(t.score)} is not over the threshold ${short(t.threshold)}; ${pressure(t)}`,
  fixed_h_reached: (t) => `the islands have done ${steps(t.h)}, as many as the rule asks for`,
  below_fixed_h: (t) => `the islands have done ${steps(t.h)}, fewer than the rule asks for`,
  pressure_low: (t) => `the servers are quiet: ${pressure(t)}`,
  pressure_high: (t) => `the servers are busy: ${pressure(t)}`,
  random_time_reached: () => "the random time for this sync has come",
  before_random_time: () => "the random time for this sync has not come yet",
  max_h_reached: (t, run) => `the islands have done ${steps(t.h_max)}, the most allowed (max_h ${n(run?.max_h)})`,
  below_min_h: (t, run) => `the islands have done ${steps(t.h)} since the last sync; none is due before ${n(run?.min_h)} (min_h)`,
  min_gap: () => "the last sync, or the last try, is too recent",
  budget_exhausted: () => "the budget is spent, or its horizon is over; set a new one to go on",
  budget_due: () => "the rest of the budget would no longer fit before its horizon ends",
  no_sync_policy: () => "the policy never syncs",
  no_islands: () => "no island has a lease",
  sync_in_flight: () => "a round is open, and the next begins after it",
  join_open_round: () => "islands began a round by themselves, and the others come in",
  islands_not_ready: () => "a slot is still empty, or an island has not reported its progress yet",
  paused: () => "the run is paused",
  manual: () => "somebody ordered this sync",
  tokens_reached: (t) => `the islands have trained on ${short(t.tokens)} tokens; the target is ${short(t.target_tokens)}`,
  tokens_below_target: (t) => `the islands have trained on ${short(t.tokens)} tokens of ${short(t.target_tokens)}`,
  cost_low: (t) => `a sync costs ${short(t.sync_cost)} violations now, no more than can still be expected`,
  cost_high: (t) => `a sync costs ${short(t.sync_cost)} violations now, more than can still be expected before the deadline`,
  cost_same_chosen: () => "many moments cost the same as now, and this one was drawn",
  cost_same_passed: () => "many moments cost the same as now, and another one will do as well",
  lower_cost_ahead: () => "the servers foresee a much lower cost before the deadline",
  cost_unknown: () => "what a sync costs is unknown",
  cost_history_short: () => "the cost has been watched for too short a time to say what is low",
  ahead_of_rate: () => "the budget is a rate, and the syncs so far are all that the time until now pays for",
  max_defer_reached: () => "the budget's longest wait for a better moment is over",
  round_due: () => "the round that other islands are in has no time left to wait",
  policy_failed: () => "the policy failed; the safe answer is to wait until max_h",
};

/** Why, in words; a reason that this page does not know is given by its name. */
export function sentence(decision, run) {
  const write = SENTENCES[decision.reason];
  return write ? write(decision.terms, run) : words(decision.reason);
}

export function presentReason(decision, run) {
  if (!decision) return "No decision has been taken yet.";
  const verb = decision.action === "sync" ? "Sync directed" : "No sync now";
  const since = decision.count > 1 ? ` This has been so for ${duration(decision.last_s - decision.first_s)}.` : "";
  const due = isKnown(decision.terms.budget_due_in_s) && decision.action !== "sync" ? ` The budget asks for one in ${duration(Math.max(0, decision.terms.budget_due_in_s))} at the latest.` : "";
  return `${verb}: ${sentence(decision, run)}.${since}${due}`;
}
