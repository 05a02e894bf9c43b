# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a slow-storage bed, a data set, a training-like job, and their runner."""
