"""What rows of prompts add to a step's time.

Prompts beside requests that decode add what they have added lately: a part for each step with prompts, and a
part for each of their rows. On a GPU the first part is more than 0 where such steps are launched kernel by
kernel. It is less than 0 where a step without prompts has room for more rows. Each further row of a request
takes as long as a prompt's row in such a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve.engine.depth.depth_config import CONFIG, DepthPolicyConfig


@dataclass(slots=True)
class PromptTimes:
    """Sums over the last steps with prompts, at the usual pace. Each step counts less than the next one."""

    config: DepthPolicyConfig = CONFIG
    steps: float = 0.0
    rows: float = 0.0
    squares: float = 0.0  # of rows
    seconds_sum: float = 0.0
    products: float = 0.0  # of rows and seconds
    further_rows: float = 0.0  # rows of the requests, without each one's first
    further_s: float = 0.0  # seconds that these take in steps without prompts

    def observe(self, rows: int, seconds: float, further_rows: int, further_s: float) -> None:
        """A step's prompts have added `seconds`. `further_rows`, `further_s`: as the fields."""
        old = 1 - self.config.prompt_step_weight
        self.steps, self.rows = old * self.steps + 1, old * self.rows + rows
        self.squares = old * self.squares + rows * rows
        self.seconds_sum = old * self.seconds_sum + seconds
        self.products = old * self.products + rows * seconds
        self.further_rows, self.further_s = (
            old * self.further_rows + further_rows,
            old * self.further_s + further_s,
        )

    @property
    def row_s(self) -> float:
        """Seconds for each row: the slope of a line through the steps (a ridge regression towards the
        mean)."""
        mean = self.rows / self.steps
        ridge = self.config.prompt_ridge_fraction * mean * self.rows
        variance = self.squares - mean * self.rows + ridge
        covariance = self.products - mean * self.seconds_sum + ridge * self.seconds_sum / self.rows
        return max(covariance / variance, 0.0)

    @property
    def step_s(self) -> float:
        """Seconds that a step with prompts takes longer, whatever their rows. They are less than 0 where the
        step has room for some rows."""
        further_s = self.crowded_s(self.further_rows, self.further_s)
        return (self.seconds_sum - self.row_s * self.rows - further_s) / self.steps

    def crowded_s(self, further_rows: float, further_s: float) -> float:
        """Seconds that further rows of requests take longer beside prompts.

        Without prompts they take `further_s`. On a GPU prompts fill up the room for more rows that a step
        has. Each further row then takes as long as a prompt's row.
        """
        return max(self.row_s * further_rows - further_s, 0.0) if further_rows else 0.0

    def seconds(self, rows: int) -> float:
        """Seconds that so many rows add. They are less than 0 where there is room for more rows."""
        return self.step_s + self.row_s * rows
