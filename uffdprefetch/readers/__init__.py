# SPDX-License-Identifier: Apache-2.0
"""One adapter for each predictor: from the service's touches to ranges that are wanted."""
