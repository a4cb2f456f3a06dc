import java.util.*;
import java.util.stream.*;

record Item(String name, int n) {}

public class Solution {
  public static void main(String[] args) {
    Map<String, Integer> m = Stream.of(new Item("a", 1), new Item("b", 2), new Item("a", 3))
        .collect(Collectors.groupingBy(Item::name, TreeMap::new, Collectors.summingInt(Item::n)));
    System.out.println(m);
  }
}
