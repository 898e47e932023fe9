"""From a problem to a plan: geometry, problem, planner and what the planners of kernel families share."""
