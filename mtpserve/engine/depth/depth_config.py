"""The constants of the depth policy and of the watchdog, each with the reason for its value.

Units are in the names: `_s` are seconds, `_steps` are steps of the engine, fractions are from 0 to 1, ratios
may be above 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DepthPolicyConfig:
    """How the policy learns, compares and probes depths."""

    # -------------------------------------------------------------------------------------- choice of a depth

    # A choice takes 0.1 to 0.4 ms of the host's time, which is 0.5 % of this interval at most.
    choice_interval_s: float = 0.08
    # A deeper depth must be better by more than the expected times err: prompts take longer with drafts.
    min_gain_fraction: float = 0.02
    # A change or a probe has a cost of its own, and the times of fewer steps are noise.
    min_steps_between_changes: int = 14
    # A depth that is so much better is taken at once: no noise of the times explains it.
    clear_value_ratio: float = 1.25
    # The batch's tokens per second are a flat function of its drafts, so that few counts find the maximum.
    max_draft_counts: int = 8

    # ------------------------------------------------------------------------------------------------- probes

    # Users do not notice such a share of the time, and drafting comes back within seconds.
    probe_budget_fraction: float = 0.0025
    # After long stable text a change is found soon with so much, and a wrong guess costs no more.
    max_saved_probe_s: float = 0.1
    # The acceptance of so many requests tells as much as that of all, and a look at one takes 10 µs.
    max_sampled_requests: int = 8
    # Loads and contexts change a depth's time by some percent in about so many steps.
    max_time_age_steps: int = 200
    # Where prompts take more of a step, their noise is larger than the difference between two depths.
    min_decode_fraction: float = 0.25
    # A depth that is worse by more needs no better time. The simulated cells bound it: 1.05 leaves depths
    # unmeasured, and 1.1 loses 4 % in steps of 24 requests whose prompts have passes of their own.
    near_value_ratio: float = 1.06
    # One time may be a disturbance, and the cell weighs the mean of three enough to compare depths.
    times_per_probe: int = 3
    # Caches hold what other steps needed: on Zen 4, steps of 0.92 ms take 1.13 to 0.95 ms for about 10 ms.
    settling_s: float = 0.01
    # One lucky draft is no news, but three times as many as expected mean another text.
    surprise_ratio: float = 3.0

    # ----------------------------------------------------------------------------------------- times of steps

    # A cell must follow slower than the pace, or the depth in use would hide what makes all depths slower.
    max_cell_observations: int = 200
    # The pace of a shared machine changes within seconds, and the mean of four steps has half their noise.
    max_pace_observations: int = 4
    # What was measured on an idle machine errs by 10 % and more, so that few observations must correct it.
    max_idle_observations: int = 2
    # A step that takes twice as long as expected, or half as long, is a disturbance and counts as no more.
    max_time_ratio: float = 2.0
    # A fit takes 1 ms, and the pace follows what changes faster.
    fit_interval_s: float = 4.0
    # Coordinate descent over eight coefficients has converged after about so many sweeps.
    fit_sweeps: int = 120
    # Up to so many rows each one costs visibly, and larger numbers that differ by a seventh share a cell.
    max_exact_count: int = 8
    # Tiles of matrix products fill up near these numbers of rows, so that further rows cost more.
    row_bends: tuple[int, ...] = (16, 64, 256)
    # Attention to fewer tokens of context than so many is never expected to take as long as the rest.
    min_context_tokens: int = 300
    # All rows of a request read the same keys and values, so that a further one adds less than the first.
    further_row_fraction: float = 0.4
    # Steps with prompts differ in their rows, and 30 of them are enough for a mean that follows the load.
    prompt_step_weight: float = 0.03
    # Prompts of the same length do not tell what a row takes, so that its time is drawn to the mean.
    prompt_ridge_fraction: float = 0.02

    # --------------------------------------------------------------------------------------------- acceptance

    # Trained MTP layers have such a rate on their model's own text, so that a new engine drafts.
    prior_acceptance: float = 0.8
    # A rate of few verifications is noise, and a wrong prior must be gone within the first text.
    prior_verifications: int = 4
    # Few drafts of unused depths are verified, and a bad start once kept a depth out of use for 10 s.
    prior_rank_verifications: int = 16
    # The mean of 300 verifications errs by 3 %, and a busy engine has so many in a second.
    max_verifications: int = 300
    # A request's factor moves by so much per verification, so that about 30 of them make it its own.
    factor_step: float = 0.03
    # Without drafts a factor returns to 1 within seconds, so that the request gets another try.
    factor_memory_fraction: float = 0.9

    # ----------------------------------------------------------------------------------- measurement at start

    # Users wait for an engine's start, which takes longer than this on any machine with a large model.
    measuring_s: float = 6.0
    # These outputs last for the measured steps of the fastest engines, and fit into every cache.
    measuring_tokens: int = 64
    # The mean of six steps errs by 3 %, and the first choice need not be better.
    measured_steps: int = 6

    @property
    def learning_interval_s(self) -> float:
        """Seconds between two steps that are learned while nothing changes: learning takes 12 to 35 µs."""
        return 2 * self.settling_s


@dataclass(frozen=True)
class WatchdogConfig:
    """When the watchdog doubts, suspends and tries the draft model."""

    # One prompt may be hard to draft by chance, and three cost no more steps than one.
    num_self_checks: int = 3
    # Users wait for an engine's start, so that a model that is slower starts unchecked.
    max_start_check_s: float = 0.5
    # A rate of 32 verifications errs by 0.09, less than what separates trained and broken heads.
    window_verifications: int = 32
    # Trained heads have 0.6 and more on their model's own text, and broken ones have about nothing.
    min_rate: float = 0.05
    # Half of the rate before is more than the noise of a window, and less than hard text takes away.
    weak_rate_fraction: float = 0.5
    # A broken head is named within seconds, and a check of 11 steps every 2 s costs little.
    doubt_interval_s: float = 2.0
    # A head that was reloaded serves again within half a minute, and the tries cost little.
    retry_interval_s: float = 30.0
    # Ten minutes without drafts are little compared with the time until somebody repairs a head.
    max_retry_interval_s: float = 600.0
    # Without self-checks the clients' texts decide, so that 16 windows of them must agree.
    min_client_verifications: int = 512
    # One client may send text that nobody can guess, but eight rarely do at once.
    min_client_requests: int = 8

    @property
    def min_verifications(self) -> int:
        """Fewer verifications decide nothing: a quarter of a window errs by 0.18."""
        return self.window_verifications // 4

    @property
    def self_check_tokens(self) -> int:
        """The outputs of three requests fill a window even where five drafts of each step are accepted."""
        return 2 * self.window_verifications

    @property
    def dead_rate_fraction(self) -> float:
        """The share of the rate before below which drafting ends: half of what is weak."""
        return self.weak_rate_fraction / 2

    @property
    def seat_wait_s(self) -> float:
        """Seconds after which a self-check without a seat leaves the decision to the clients' drafts."""
        return 2 * self.doubt_interval_s


CONFIG = DepthPolicyConfig()
WATCHDOG_CONFIG = WatchdogConfig()
