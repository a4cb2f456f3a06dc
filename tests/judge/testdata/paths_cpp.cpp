#include <bits/stdc++.h>
using namespace std;
int main() {
  int n, m;
  cin >> n >> m;
  vector<vector<pair<int, int>>> g(n);
  while (m--) {
    int a, b, w;
    cin >> a >> b >> w;
    g[a].push_back({b, w});
    g[b].push_back({a, w});
  }
  vector<long> d(n, LONG_MAX);
  priority_queue<pair<long, int>, vector<pair<long, int>>, greater<>> q;
  q.push({d[0] = 0, 0});
  while (!q.empty()) {
    auto [x, a] = q.top();
    q.pop();
    if (x > d[a]) continue;
    for (auto [b, w] : g[a]) {
      if (x + w < d[b]) q.push({d[b] = x + w, b});
    }
  }
  for (long x : d) cout << x << " ";
  cout << endl;
}
