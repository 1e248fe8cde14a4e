// What programs may use whether they ask for it or not; compiled once.
#include <bits/stdc++.h>
